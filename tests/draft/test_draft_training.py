"""Training of the drafter: what is paired with what, losses, budgets, preemption, publication, and that it pays."""

import copy
import math
from itertools import pairwise

import pytest
import torch
from drafted import VOCABULARY, attach_slots, filled, hidden_of, numbers, target
from torch import Tensor
from transformers import LlamaForCausalLM

from whet.draft.buffer import DataBuffer, Window
from whet.draft.eagle import EagleHead, eagle_head
from whet.draft.training import DrafterTrainer, losses, pair_up, with_guesses
from whet.errors import WhetError
from whet.model.load import tiny_model

# ---- what is paired with what


def marked() -> DataBuffer:
    """hidden[t] = one-hot(t), and in a further column the entry's number; ids[t] = 100 * entry + t."""
    buffer = DataBuffer(1000)
    for entry, tokens in enumerate((6, 11, 4)):
        hidden = torch.cat(
            (torch.eye(20)[: tokens - 1], torch.full((tokens - 1, 1), float(entry))), 1
        )
        buffer.add(0, [100 * entry + t for t in range(tokens)], hidden, prompt=entry + 2)
    return buffer


@pytest.mark.parametrize("room", [1000, 7, 3])
def test_every_pair_is_the_state_of_t_with_token_t_plus_1_and_answers_the_state_of_t_plus_1(
    room: int,
) -> None:
    for key in range(10):
        pairs = pair_up(marked().sample(room, (key,)))
        at, owner = pairs.hidden[:, :20].argmax(1), pairs.hidden[:, 20].long()
        assert torch.equal(pairs.ids, 100 * owner + at + 1)
        assert torch.equal(pairs.answer[:, :20].argmax(1), at + 1)
        assert torch.equal(pairs.answer[:, 20].long(), owner)
        assert torch.equal(pairs.position, at)
        assert torch.equal(pairs.trained, at + 2 >= owner + 2), "what is guessed is token t + 2"
        starts = pairs.packed.starts.tolist()
        for first, end in pairwise(starts):
            assert owner[first:end].unique().numel() == 1, "a document is one entry"
            assert torch.equal(at[first:end], at[first] + torch.arange(end - first)), (
                "in order, without holes"
            )


def test_pairs_of_a_document_see_nothing_of_others_nor_of_later_ones() -> None:
    """Hidden states are changed one by one: guesses change in the same document from there on, and nowhere else."""
    model = target()
    head = eagle_head(model, seed=1)
    pairs = pair_up(filled(model).sample(1000, (0,)))
    before = head(pairs.hidden, pairs.ids, pairs.position, pairs.packed)
    starts = pairs.packed.starts.tolist()
    for first, end in pairwise(starts):
        for t in (first, (first + end) // 2, end - 1):
            hidden = pairs.hidden.clone()
            hidden[t] += 1.0
            after = head(hidden, pairs.ids, pairs.position, pairs.packed)
            changed = (after - before).abs().amax(1) > 1e-12
            assert changed.nonzero()[:, 0].tolist() == list(range(t, end))


def test_own_guesses_stand_for_the_state_one_pair_later_of_the_same_document() -> None:
    model = target()
    head = eagle_head(model, seed=1)
    pairs = pair_up(filled(model).sample(1000, (0,)))
    guess = head(pairs.hidden, pairs.ids, pairs.position, pairs.packed).detach()
    chosen = torch.zeros(len(pairs.ids), dtype=torch.bool)
    starts = pairs.packed.starts.tolist()
    chosen[[0, 3, starts[1], starts[1] + 1]] = True
    mixed = with_guesses(head, pairs, chosen)
    want = pairs.hidden.clone()
    want[3], want[starts[1] + 1] = guess[2], guess[starts[1]]
    assert torch.equal(mixed.hidden, want) and torch.equal(mixed.answer, pairs.answer)


# ---- losses


def test_the_losses_are_their_formulas() -> None:
    model = target()
    head = eagle_head(model, draft_ids=torch.tensor([1, 4, 9, 16]), seed=1)
    pairs = pair_up(filled(model).sample(1000, (0,)))
    feature, token, agreement = losses(head, pairs)
    guess = head(pairs.hidden, pairs.ids, pairs.position, pairs.packed)
    rows = model.get_output_embeddings().weight[[1, 4, 9, 16]].detach()
    want_feature = want_token = agreed = 0.0
    for f, h, trained in zip(guess.detach(), pairs.answer, pairs.trained, strict=True):
        if trained:
            gap = (f - h).abs()
            want_feature += float(torch.where(gap < 1, gap**2 / 2, gap - 0.5).mean())
            want_token -= float((torch.softmax(rows @ h, 0) * torch.log_softmax(rows @ f, 0)).sum())
            agreed += float((rows @ h).argmax() == (rows @ f).argmax())
    assert not pairs.trained.all()
    assert [part.item() for part in (feature, token, agreement)] == pytest.approx(
        [want_feature, want_token, agreed]
    )


def gradients(head: EagleHead, windows: list[Window], chunk: int) -> list[Tensor]:
    feature, token, _ = losses(head, pair_up(windows), chunk=chunk)
    return list(torch.autograd.grad(feature + token, list(head.parameters())))


def test_packed_is_unpacked_and_chunks_do_not_matter() -> None:
    model = target()
    head = eagle_head(model, seed=1)
    windows = filled(model).sample(1000, (0,))
    assert len(windows) == 4
    packed = gradients(head, windows, chunk=2**20)
    for chunk in (2**20, 3 * VOCABULARY):
        alone = [gradients(head, [window], chunk) for window in windows]
        for whole, *parts in zip(packed, *alone, strict=True):
            torch.testing.assert_close(sum(parts), whole, rtol=1e-9, atol=1e-12)


def test_a_run_reports_means_over_its_trained_pairs() -> None:
    """The token loss of one token is at most that of an even guess; sums in place of means would pass it many times."""
    model = target(torch.float32)
    found = DrafterTrainer(eagle_head(model), filled(model), lr=0.0, pack=64).run(1000)
    assert 0.0 < found.feature_loss < 2.0 and 0.0 <= found.agreement <= 1.0
    assert 0.8 * math.log(VOCABULARY) < found.token_loss < 1.2 * math.log(VOCABULARY)


@pytest.mark.slow
@pytest.mark.parametrize("half", [False, True])
def test_losses_fall_on_a_fixed_buffer(half: bool) -> None:
    model = target(torch.float32)
    trainer = DrafterTrainer(eagle_head(model), filled(model), lr=3e-3, pack=64)
    trainer.half = half
    first = trainer.run(64)
    for _ in range(6):
        last = trainer.run(1000)
    assert last.feature_loss < 0.3 * first.feature_loss
    assert last.token_loss < first.token_loss
    assert last.agreement > 0.8 > first.agreement
    assert all(
        torch.isfinite(m).all() and m.any()
        for name, m in trainer.tensors().items()
        if "exp_avg" in name
    )


# ---- budgets, preemption


def test_the_budget_is_a_ceiling_in_tokens() -> None:
    model = target(torch.float32)
    trainer = DrafterTrainer(eagle_head(model), filled(model), pack=16)
    for budget in (1, 15, 50, 333):
        done = trainer.run(budget)
        assert budget - 8 < done.tokens <= budget
    assert trainer.run(0).updates == 0
    nothing = DrafterTrainer(eagle_head(model), DataBuffer(10)).run(100)
    assert nothing.tokens == 0 and nothing.feature_loss == 0.0


def stop_after(packs: int):
    left = iter([False] * packs)
    return lambda: next(left, True)


@pytest.mark.parametrize("packs", [0, 1, 5])
def test_preempted_saved_and_resumed_is_uninterrupted(packs: int) -> None:
    model = target(torch.float32)
    live = eagle_head(model, seed=4)
    whole = DrafterTrainer(live, filled(model), pack=20, seed=9)
    assert whole.run(300).updates > 10

    first = DrafterTrainer(live, filled(model), pack=20, seed=9)
    part = first.run(300, stop_after(packs))
    assert part.tokens < 300 and part.updates <= packs
    second = DrafterTrainer(eagle_head(model, seed=77), filled(model), pack=20, seed=1)
    second.load(first.state_dict(), first.tensors())
    rest = second.run(300 - part.tokens)
    assert part.tokens + rest.tokens == 300 and second.state_dict() == whole.state_dict()
    saved, want = second.tensors(), whole.tensors()
    assert set(saved) == set(want) and all(torch.equal(saved[name], want[name]) for name in want)


def test_tensors_of_another_model_are_refused() -> None:
    model = target(torch.float32)
    trainer = DrafterTrainer(eagle_head(model), DataBuffer(10))
    tensors = trainer.tensors()
    with pytest.raises(WhetError, match=r"weight\.fc"):
        trainer.load(trainer.state_dict(), {**tensors, "weight.fc": torch.zeros(2, 2)})
    with pytest.raises(WhetError, match=r"exp_avg\.norm"):
        trainer.load(
            trainer.state_dict(), {n: t for n, t in tensors.items() if n != "exp_avg.norm"}
        )


def test_what_is_not_finite_is_skipped_and_counted() -> None:
    model = target(torch.float32)
    buffer = filled(model, lengths=(9,))
    trainer = DrafterTrainer(eagle_head(model), buffer)
    before = trainer.tensors()
    buffer.entries[0].hidden[5] = torch.nan
    done = trainer.run(7)
    assert (done.updates, done.skipped) == (0, 1)
    assert all(torch.equal(before[name], tensor) for name, tensor in trainer.tensors().items())


def test_a_pack_of_prompts_alone_teaches_nothing() -> None:
    model = target(torch.float32)
    trainer = DrafterTrainer(eagle_head(model), filled(model, lengths=(9,), prompt=9))
    assert trainer.run(7).updates == 0 and trainer.packs == 1


# ---- publication


def test_publication_writes_in_place_and_leaves_the_target_bit_for_bit() -> None:
    model = target(torch.bfloat16)
    before = copy.deepcopy(model.state_dict())
    live = eagle_head(model, draft_ids=torch.arange(12))
    rows = live.draft_head.weight.clone()
    places = [p.data_ptr() for p in live.parameters()]
    old = live.fc.detach().clone()
    trainer = DrafterTrainer(live, filled(model))
    assert trainer.run(200).updates and trainer.head.fc.dtype == torch.float32
    assert torch.equal(live.fc, old), "not before it is published"
    live.take(trainer.head)
    assert not torch.equal(live.fc, old) and torch.equal(live.fc, trainer.head.fc.bfloat16())
    assert [p.data_ptr() for p in live.parameters()] == places
    assert torch.equal(live.draft_head.weight, rows)
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())
    assert not [p for p in model.parameters() if p.grad is not None]


# ---- that it pays


def counting_target() -> LlamaForCausalLM:
    """Learns to count digits up or down by a step that its first two tokens show."""
    model = tiny_model(12, hidden=48, layers=2, heads=4, context=64)
    optimizer, random = (
        torch.optim.AdamW(model.parameters(), lr=3e-3),
        torch.Generator().manual_seed(0),
    )
    for _ in range(150):
        ids = counting(32, 20, random)
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    return model


def counting(rows: int, length: int, random: torch.Generator) -> Tensor:
    first, by = (torch.randint(10, (rows, 1), generator=random) for _ in range(2))
    return (first + by * torch.arange(length)) % 10 + 2


def accepted(head: EagleHead, model: LlamaForCausalLM, ids: Tensor, steps: int) -> float:
    """Mean of drafted tokens that are what the target goes on with, from the middle of each row of ids."""
    attach_slots(head, 1, 64)
    half, total = ids.shape[1] // 2, 0
    for row in ids:
        hidden = hidden_of(model, row)[: half - 1]
        features = head.extend(
            hidden,
            row[1:half].to(torch.int32),
            numbers(range(half - 1)),
            numbers([0] * (half - 1)),
            numbers([[0]]),
            numbers([half - 1]),
            numbers([0, half - 1]),
            half - 1,
        )
        drafted = head.draft(
            features[-1:], numbers([half - 1]), numbers([0]), numbers([[0]]), steps
        )[0]
        right = (drafted == row[half : half + steps]).int()
        total += int(right.cumprod(0).sum())
    return total / len(ids)


@pytest.mark.slow
def test_the_trained_drafter_is_accepted_far_above_chance() -> None:
    model, random = counting_target(), torch.Generator().manual_seed(1)
    live, buffer = eagle_head(model), DataBuffer(5000)
    for ids in counting(100, 20, random):
        buffer.add(0, ids, hidden_of(model, ids)[:-1], prompt=2)
    unseen = counting(40, 20, torch.Generator().manual_seed(2))
    untrained = accepted(live, model, unseen, steps=5)
    trainer = DrafterTrainer(live, buffer, lr=2e-3, pack=200)
    done = trainer.run(60_000)
    live.take(trainer.head)
    after = accepted(live, model, unseen, steps=5)
    assert untrained < 0.6 and after > 3.0, (untrained, after, done)


@pytest.mark.gpu
def test_on_a_gpu_in_half_precision_losses_fall_too() -> None:
    model = target(torch.bfloat16).cuda()
    buffer = DataBuffer(10_000, device="cuda")
    random = torch.Generator().manual_seed(5)
    for length in (9, 5, 17, 12):
        ids = torch.randint(VOCABULARY, (length,), generator=random).cuda()
        buffer.add(0, ids, hidden_of(model, ids)[:-1], prompt=3)
    assert buffer.entries[0].hidden.is_cuda and buffer.entries[0].hidden.dtype == torch.bfloat16
    live = eagle_head(model, draft_ids=torch.arange(20))
    trainer = DrafterTrainer(live, buffer, lr=3e-3, pack=64)
    first = trainer.run(64)
    for _ in range(6):
        last = trainer.run(1000)
    assert last.feature_loss < 0.5 * first.feature_loss and last.skipped == 0
    live.take(trainer.head)
    assert torch.equal(live.fc, trainer.head.fc.bfloat16())
    again = DrafterTrainer(live, buffer)
    again.load(trainer.state_dict(), trainer.tensors())
    assert again.run(100).updates
