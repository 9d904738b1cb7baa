import numpy as np
import pytest
import torch
from learner_scores import explicit_gram, score_gram
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

from whet.errors import WhetError
from whet.model.load import tiny_model

VOCAB = 23
PROMPT = [4, 0, 9, 4, 2]
"""With the padding id 0 among them, whose embedding torch never trains, and an id twice."""


def responses(seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, n) for n in (3, 11, 1, 7, 7, 2)]


def untied() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_bias=True,
        tie_word_embeddings=False,
        pad_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return LlamaForCausalLM(config).double()


def tied() -> LlamaForCausalLM:
    return tiny_model(VOCAB, hidden=24, heads=3, kv_heads=1, dtype=torch.float64, seed=1)


@pytest.mark.parametrize("make", [tied, untied])
@pytest.mark.parametrize("limits", [{}, {"pack": 20, "keep": 1, "tile": 300}], ids=["at once", "in small parts"])
def test_one_packed_pass_gives_what_a_pass_for_each_gives(make, limits) -> None:  # type: ignore[no-untyped-def]
    model = make().eval()
    wanted = explicit_gram(model, PROMPT, responses(), temperature=0.7)
    found = score_gram(model, PROMPT, responses(), temperature=0.7, **limits)
    assert found == pytest.approx(wanted, rel=1e-9, abs=1e-9 * np.abs(wanted).max())
    assert all(p.requires_grad and p.grad is None for p in model.parameters()), "the model is left as it was"


def test_single_precision_is_near() -> None:
    wanted = explicit_gram(tied(), PROMPT, responses())
    found = score_gram(tied().float(), PROMPT, responses())
    assert np.abs(found - wanted).max() < 1e-4 * np.abs(wanted).max()


def test_frozen_matrices_do_not_count() -> None:
    model = untied()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("q_proj" in name or "lm_head" in name)
    assert score_gram(model, PROMPT, responses()) == pytest.approx(explicit_gram(model, PROMPT, responses()), rel=1e-9)


def test_a_soft_capped_head_counts_its_slope() -> None:
    """Gemma 2: logits become c tanh(logits / c). Its embedding scales what it looks up, so it is refused if trained."""
    config = Gemma2Config(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        final_logit_softcapping=0.5,
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = Gemma2ForCausalLM(config).double().eval()
    with pytest.raises(WhetError, match="no plain embedding"):
        score_gram(model, PROMPT, responses())
    model.model.embed_tokens.requires_grad_(False)
    wanted = explicit_gram(model, PROMPT, responses())  # its norms work in fp32 whatever the weights are
    assert score_gram(model, PROMPT, responses()) == pytest.approx(wanted, abs=1e-6 * wanted.max())


def test_a_matrix_of_another_kind_is_refused() -> None:
    model = tied()
    model.model.extra = torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.float64))
    with pytest.raises(WhetError, match=r"trains model\.extra"):
        score_gram(model, PROMPT, responses())
