"""What a model takes of the device here, and how it will train and decode there: known before any weight is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from whet import config
from whet.estimate import Machine, gpu_of

if TYPE_CHECKING:
    import torch

    from whet.model.memory import Finding, Footprint

# transformers' model_type -> the family's name, and which of its real weights were tried; "" means that only a tiny
# configuration with random weights was tested. docs/models.md has the same table.
FAMILIES = {
    "llama": ("Llama", "SmolLM2-135M"),
    "qwen2": ("Qwen2", "Qwen2.5-Coder-0.5B"),
    "qwen3": ("Qwen3", ""),
    "mistral": ("Mistral", ""),
    "gemma2": ("Gemma 2", ""),
    "gemma3_text": ("Gemma 3 (text)", ""),
    "phi": ("Phi", ""),
    "phi3": ("Phi-3", ""),
}


def size_up_here(network: Any, settings: config.Config) -> Footprint:
    """What training this network takes of the device that the recipe names."""
    from whet.model.load import pick_device
    from whet.model.memory import size_up

    device = pick_device(settings.model)
    graphs = device.type == "cuda" and why_no_graphs(network, settings.model.dtype, device) is None
    return size_up(network, settings, device, graphs=graphs)


def model_findings(network: Any, footprint: Footprint) -> list[Finding]:
    """What the model is, how fast it trains and decodes, how much memory it takes, and whether that is there."""
    from whet.model.memory import free_memory

    name = type(network).__name__
    model = footprint.settings.model
    shape = footprint.shape
    adapters = model.lora.rank * shape.adapted
    trained = (
        f", {adapters / 1e6:,.2f}M more in adapters of rank {model.lora.rank}" if adapters else ""
    )
    return [
        (
            "model",
            f"{name}, {shape.parameters / 1e6:,.2f}M parameters{trained}, in {model.dtype}",
            True,
        ),
        ("family", tried(network.config.model_type), True),
        ("path", footprint.path(), True),
        ("rollouts", decoding_of(network, footprint.settings, footprint.device), True),
        *footprint.findings(free_memory(footprint.device)),
    ]


def tried(model_type: str) -> str:
    """On what the family of a model was tried.

    >>> tried("llama"), tried("phi")
    ('Llama, tried on real weights (SmolLM2-135M)', 'Phi, tested with a tiny configuration only')
    """
    if model_type not in FAMILIES:
        return f"{model_type}, never tried with whet"
    name, weights = FAMILIES[model_type]
    return (
        f"{name}, tried on real weights ({weights})"
        if weights
        else f"{name}, tested with a tiny configuration only"
    )


def decoding_of(network: Any, settings: config.Config, device: torch.device) -> str:
    """How rollouts are decoded, and why not faster."""
    if settings.rollout.engine == "vllm":
        return "vLLM, on a copy of the weights"
    plain = "plain calls of the model's own layers"
    if device.type == "cpu":
        return plain
    if why := why_no_graphs(network, settings.model.dtype, device):
        return f"{plain}, since {why}"
    if not settings.rollout.graphs:
        return f"{plain}; rollout.graphs = true captures them as graphs over kernels"
    from whet.fast.fused import unfusable

    why = "adapters are not merged" if settings.model.lora.rank else unfusable(network)
    return "graphs over kernels, " + (f"its own layers: {why}" if why else "fused layers")


def why_no_graphs(network: Any, dtype: str, device: torch.device) -> str | None:
    """Why rollouts cannot run by graphs, in a few words, as the engine will find it; None where they can."""
    import torch

    from whet.fast.fused import graphs_lack
    from whet.model.twin import kv_shapes

    return graphs_lack(kv_shapes(network), device, getattr(torch, dtype))


def machine_of(device: torch.device) -> Machine:
    """The device as `whet.estimate` sees it."""
    import torch

    if device.type != "cuda":
        threads = torch.get_num_threads()
        return Machine(name=f"a CPU, {threads} thread{'s' * (threads > 1)}", threads=threads)
    name = (
        torch.cuda.get_device_name(device)
        if torch.cuda.is_available()
        else "the GPU of another machine"
    )
    return Machine(name=name, gpu=gpu_of(name))
