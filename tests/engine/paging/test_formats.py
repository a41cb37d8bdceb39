"""Stored forms of other publishers: read to the values that were meant, whole in every move."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.api import EngineError
from engine.config import ConfigError
from engine.kernels.formats import Matrix, dequantise
from engine.kernels.ops import ops
from engine.kernels.router import Routing
from engine.model import quantised
from engine.model.expert_layout import ExpertLayout
from engine.model.experts import PagedExperts
from engine.model.packing import join
from engine.model.placement import Placement
from engine.model.quantised import read_linear, repack_experts, repacker
from engine.model.qwen3_loading import load_qwen3
from engine.model.qwen3_random import QwenRandom
from engine.qwen3_config import Qwen3Config
from tests.engine.paging.checkpoints import CONFIG, STORED, method, quantise, values, write_qwen
from tests.engine.paging.test_experts import CPU, INNER, TOP_K, D, E, routing, run

KINDS = [kind for kind in STORED if kind != "plain"]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
#: Largest error of a value, as a share of its row's or group's largest.
ERRORS = {
    "fp8_block": 2**-4, "fp8_channel": 2**-4, "int8_channel": 0.51 / 127, "nvfp4": 0.2,
    "int4_awq": 0.08, "int4_gptq": 0.08,
}  # fmt: skip


def linear(kind: str, rows: int, columns: int, generator: torch.Generator) -> Matrix:
    noise = torch.randn(rows, columns, generator=generator) * columns**-0.5
    return read_linear(method(kind), quantise(kind, noise))


def weights(kind: str) -> list[tuple[Matrix, Matrix]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            join([linear(kind, INNER, D, generator), linear(kind, INNER, D, generator)]),
            linear(kind, D, INNER, generator),
        )
        for _ in range(E)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_that_were_stored(kind: str) -> None:
    """Within the rounding of the form; for INT4 with the whole range of codes and zero points."""
    w = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    w[:, :32] += 2.0  # lopsided groups, so that zero points differ
    error = (values(kind, quantise(kind, w)) - w).abs().max() / w.abs().max()
    assert error < ERRORS[kind]


def test_gptq_zero_points_are_not_read_and_awqs_are() -> None:
    """Other zero points change AWQ's values and leave GPTQ's."""
    w = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    for kind, differs in (("int4_gptq", False), ("int4_awq", True)):
        stored = quantise(kind, w)
        before = values(kind, stored)
        stored["qzeros"] = ~stored["qzeros"]
        assert torch.equal(before, values(kind, stored)) is not differs


@pytest.mark.parametrize("kind", KINDS)
def test_paged_equals_resident(kind: str) -> None:
    """Any slots, any history: the same bits, every tensor with its expert (J4, J5)."""
    table = ops("torch")
    read = weights(kind).__getitem__
    resident = Placement(device=CPU, pin=False).place(0, read, E)
    for slots in (TOP_K, 4):
        other = Placement({0: slots}, device=CPU, pin=False).place(0, read, E)
        assert isinstance(other, PagedExperts)
        for seed, rows in enumerate((1, 6, 2, 1, 3)):
            x, how = routing(table, rows, seed)
            assert torch.equal(run(other, x, how), run(resident, x, how))
            other.check_integrity()


@pytest.mark.parametrize(
    ("kind", "name"), [("int4_awq", "zeros"), ("nvfp4", "global_scale"), ("nvfp4", "scale")]
)
def test_a_tensor_that_stays_behind_is_seen(kind: str, name: str) -> None:
    """Slots that keep the zero points or scales of whom they held before compute something else (c1, c2)."""
    table = ops("torch")
    read = weights(kind).__getitem__
    resident = Placement(device=CPU, pin=False).place(0, read, E)
    other = Placement({0: 4}, device=CPU, pin=False).place(0, read, E)
    assert isinstance(other, PagedExperts)
    parts = [part[name] for part in other.layout._parts]
    bring_in = other._bring_in

    def faulty(*args: object) -> Tensor:
        spans = [slice(part.offset, part.offset + part.nbytes) for part in parts]
        before = [other.slots[:, span].clone() for span in spans]
        tiles = bring_in(*args)  # type: ignore[arg-type]
        for span, kept in zip(spans, before, strict=True):
            other.slots[:, span] = kept
        return tiles

    other._bring_in = faulty  # type: ignore[method-assign]
    differs = []
    for seed in range(4):
        x, how = routing(table, 1, seed)
        differs.append(not torch.equal(run(other, x, how), run(resident, x, how)))
    assert any(differs)
    with pytest.raises(RuntimeError, match="does not hold the bytes"):
        other.check_integrity()


def _experts(kind: str, count: int = 7) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [quantise(kind, torch.randn(32, 64, generator=generator)) for _ in range(count)]


@pytest.mark.parametrize("kind", ["int4_awq", "int4_gptq"])
@pytest.mark.parametrize("chunk", [1, 3, 7, 10])
def test_repacking_in_chunks_is_repacking_alone(kind: str, chunk: int) -> None:
    """Chunks of any size, short last ones included, give what each expert gives alone."""
    experts = _experts(kind)
    for found, raw in zip(
        repack_experts(repacker(method(kind)), experts, chunk=chunk), experts, strict=True
    ):
        alone = read_linear(method(kind), raw)
        assert all(torch.equal(t, alone.tensors[n]) for n, t in found.tensors.items())


def _mixing(kind: str, share: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], Matrix]:
    plain = repacker(method(kind))

    def repack(raw: dict[str, Tensor]) -> Matrix:
        return plain({**raw, "scales": share(raw["scales"])})

    return repack


def test_a_repack_that_mixes_experts_is_refused() -> None:
    """A scale shared by those repacked together is not the expert's own (c6)."""
    mixing = _mixing("int4_awq", lambda s: s.amax(0, keepdim=True).expand_as(s))
    with pytest.raises(EngineError, match="gives another scale beside other experts"):
        repack_experts(mixing, _experts("int4_awq"), chunk=3)


def test_rows_that_nobody_wrote_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short last chunk over memory with anything in it shows where experts are mixed (c7).

    All experts have the same scales here, so that mixing alone would not show.
    """
    experts = _experts("int4_awq")
    for raw in experts:
        raw["scales"] = experts[0]["scales"]
    mixing = _mixing("int4_awq", lambda s: s.amax(0, keepdim=True).expand_as(s))
    repack_experts(mixing, experts, chunk=3)
    stack = quantised._stack

    def poisoned(all_experts, chosen):  # type: ignore[no-untyped-def]
        found = stack(all_experts, chosen)
        real = len(set(chosen))
        return {n: t.clone() for n, t in found.items()} | {
            "scales": torch.cat([found["scales"][:real], found["scales"][real:] * torch.nan])
        }

    monkeypatch.setattr(quantised, "fill", lambda part, order, chunk: part + part[:1] * (chunk - len(part)))  # fmt: skip
    monkeypatch.setattr(quantised, "_stack", poisoned)
    with pytest.raises(EngineError, match="gives another scale"):
        repack_experts(mixing, experts, chunk=3)


@pytest.mark.parametrize("kind", list(STORED))
def test_a_checkpoint_of_each_form_is_loaded(kind: str, tmp_path: Path) -> None:
    """Experts as stored, the rest plain; paged and resident models give the same logits."""
    path = write_qwen(tmp_path / kind, kind)
    found = [
        load_qwen3(path, kernels="torch", device="cpu", dtype=torch.float32, slots=slots)
        for slots in (None, {0: 3, 2: 2})
    ]
    kinds = {layer.experts.w13.kind for model in found for layer in model.layers}
    assert kinds == {kind}
    assert isinstance(found[1].layers[2].experts, PagedExperts)
    from tests.engine.qwen3.test_qwen3 import run as logits

    a, b = (logits(model, [5, 9, 300, 2, 7], [3, 1, 1]) for model in found)
    assert torch.equal(a, b)


def test_layout_keeps_what_nobody_reads() -> None:
    """GPTQ's zero points move too: a tensor of the expert is a tensor of its bytes."""
    pair = weights("int4_gptq")[0]
    layout = ExpertLayout(pair)
    row = torch.zeros(layout.nbytes, dtype=torch.uint8)
    layout.write(row, pair)
    (back, _) = (stack[0] for stack in layout.stacks(row[None]))
    assert torch.equal(back.tensors["zeros"], pair[0].tensors["zeros"])


@pytest.mark.parametrize(
    "given",
    [
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False},
        {"quant_method": "awq", "bits": 3, "group_size": 32},
        {"quant_method": "fp8"},
        {"quant_method": "bitsandbytes"},
    ],
)
def test_other_forms_are_refused_with_what_is_read(given: dict[str, object]) -> None:
    """The message has what the file says and the list of forms."""
    with pytest.raises(ConfigError, match=r"expected one of fp8 with a square.*awq.*gptq.*NVFP4"):
        Qwen3Config.from_dict(CONFIG | {"quantization_config": given})


def test_damaged_tensors_are_named(tmp_path: Path) -> None:
    """A missing scale is named with the shape that was expected."""
    from safetensors.torch import load_file, save_file

    path = write_qwen(tmp_path, "fp8_channel")
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.1.mlp.experts.3.down_proj.weight_scale"
    tensors[name] = tensors[name][:5].contiguous()
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(EngineError, match=r"experts\.3\.down_proj\.weight_scale: expected \[64, 1\], got \[5, 1\]"):  # fmt: skip
        load_qwen3(path, kernels="torch", device="cpu", dtype=torch.float32)


@pytest.mark.parametrize("kind", ["int8_channel", "nvfp4", "int4_awq"])
def test_kernels_compute_unfolded_weights(kind: str) -> None:
    """By the kernels for plain weights as by the twins, paged and resident alike, with few rows and more."""
    read = weights(kind).__getitem__
    for rows in (1, 3):
        x, how = routing(ops("torch"), rows, 0)
        want = run(Placement(device=CPU, pin=False).place(0, read, E), x, how)
        device = torch.device(DEVICE)
        on = Routing(*(getattr(how, f.name).to(device) for f in fields(how)))
        for slots in ({}, {0: 2}):
            held = Placement(slots, device=device, pin=DEVICE == "cuda").place(0, read, E)
            got = held.run(ops("triton"), x.to(device), on, None, None, limit=10.0, act_group=None)
            parts = want[:, :TOP_K]
            # one row's parts come added up
            wanted = parts.sum(1, keepdim=True) if rows == 1 else parts
            assert (got.cpu()[:, :TOP_K] - wanted).abs().max() < 1e-5


def test_drawn_fp8_experts_are_what_the_kernels_read() -> None:
    """FP8 in blocks with power-of-two scales, of the values drawn in bfloat16, for routed experts alone."""
    config = Qwen3Config.from_dict(CONFIG)
    plain, fp8 = QwenRandom(config, CPU, 1), QwenRandom(config, CPU, 1, fp8=True)
    name = "model.layers.0.mlp.experts.1.up_proj"
    packed = fp8.linear(name)
    assert packed.kind == "fp8"
    want = dequantise(plain.linear(name))
    assert (dequantise(packed) - want).abs().max() < 2**-4 * want.abs().max()
    assert fp8.linear("model.layers.0.self_attn.q_proj").kind == "plain"
