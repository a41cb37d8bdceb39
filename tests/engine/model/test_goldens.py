"""The golden tensors, and every mistake they are known to see, planted in this model.

The table is that of the reference spec check: 28 planted mistakes, three of which its golden cannot
see. Two of those have tests in test_mhc.py; the third, unscaled index weights, is harmless: a
positive factor moves no order.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import orjson
import pytest
import torch
from safetensors.torch import load_file

from engine.cli import main
from engine.kernels import reference as ops
from engine.model import v4
from engine.model.v4 import Model
from engine.model.weights import Assembler
from engine.verify import load, run, verify

ORACLE = Path(__file__).parents[2] / "data" / "oracle"
GOLDENS = ["golden_tiny", "golden_v41_degenerate_r1", "golden_v41_degenerate_r2"]
SEEN = 1e-3  # ten times the goldens' tolerance


@pytest.mark.parametrize("name", GOLDENS)
def test_the_command_passes_on_every_golden(name, capsys):
    """`bathyal engine verify` prints the difference and exits 0; it is far below the bound."""
    assert main(["verify", str(ORACLE / name)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("logits max_abs_diff=")
    assert verify(ORACLE / name)[0].max_abs_diff < 2e-5


def test_a_difference_beyond_atol_exits_1(capsys):
    """The bound can be given, and is what decides."""
    assert main(["verify", str(ORACLE / GOLDENS[0]), "--atol", "1e-9"]) == 1
    assert "DIFFERS" in capsys.readouterr().out


def test_v41_weights_are_not_read_as_v4(tmp_path, capsys):
    """A ratio that V4 does not have is refused by name."""
    folder = shutil.copytree(ORACLE / GOLDENS[2], tmp_path / "copy")
    spec = orjson.loads((folder / "verify.json").read_bytes())
    (folder / "verify.json").write_bytes(orjson.dumps(spec | {"architecture": "v4"}))

    assert main(["verify", str(folder)]) == 2
    assert "compress_ratios[2]: expected one of [0, 4, 8" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"naming": "mine"}, "naming: expected one of"),
        ({"golden": "absent.safetensors"}, "expected golden tensors"),
        ({"golden": None}, "golden: expected"),
        ({"inputs": "ids"}, "expected ids, got"),
        ({"outputs": {"logits": "", "hidden": ""}}, "expected hidden, got"),
        ({"weights": "absent.safetensors"}, "expected config_hf.json and absent.safetensors"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_misuse_exits_2_with_a_reason(tmp_path, capsys, change, message):
    """A verify.json that cannot be followed is misuse, not a difference."""
    folder = shutil.copytree(ORACLE / GOLDENS[1], tmp_path / "copy")
    spec = orjson.loads((folder / "verify.json").read_bytes())
    (folder / "verify.json").write_bytes(orjson.dumps(spec | change))

    assert main(["verify", str(folder)]) == 2
    assert message in capsys.readouterr().err


def test_a_folder_without_verify_json_exits_2(tmp_path, capsys):
    """So does a folder that is none, and a bound that is none."""
    assert main(["verify", str(tmp_path)]) == 2
    assert "expected a verify.json" in capsys.readouterr().err
    assert main(["verify", str(ORACLE / GOLDENS[0]), "--atol", "-1"]) == 2
    assert "--atol: expected a number >= 0" in capsys.readouterr().err
    assert main(["verify"]) == 2
    assert main(["frobnicate"]) == 2


# ---------------------------------------------------------------- planted mistakes


def _op(name, change):
    """Replace an operation by a changed one; `change` gets the original first."""

    def plant(monkeypatch):
        original = getattr(ops, name)
        monkeypatch.setattr(ops, name, lambda *args: change(original, *args))

    return plant


def _config(**changes):
    """Run with another configuration."""

    def plant(monkeypatch):
        original = Model.__init__

        def init(self, config, *args, **kwargs):
            original(self, dataclasses.replace(config, **changes), *args, **kwargs)

        monkeypatch.setattr(Model, "__init__", init)

    return plant


def _comb_through_sigmoid(original, logits, *rest):
    # log of the sigmoid, so that the softmax inside gives normalised sigmoids; undo the norm first
    return original(torch.log(torch.sigmoid(logits)), *rest)


def _half_split(original, x, turns):
    dims = turns.shape[-1]
    tail = x[..., -2 * dims :]
    tail.copy_(tail.unflatten(-1, (2, dims)).transpose(-1, -2).flatten(-2).clone())
    original(x, turns)
    tail.copy_(tail.unflatten(-1, (dims, 2)).transpose(-1, -2).flatten(-2).clone())
    return x


def _visible(shift):
    def plant(monkeypatch):
        original = v4._visible_entries
        monkeypatch.setattr(
            v4, "_visible_entries", lambda p, most, ratio: original(p + shift, most, ratio)
        )

    return plant


def _entry_position_last(width):
    """Rotate what the compressors make (of this width) at a group's last token, not its first."""

    def plant(monkeypatch):
        turns_of, rotate = Model._entry_turns, ops.rope_
        late = {}

        def entry_turns(self, layer, step):
            turns = turns_of(self, layer, step)
            shift = torch.tensor([layer.ratio - 1])
            late[id(turns)] = turns * ops.rope_turns(shift, self._compress_freqs, self.dtype)
            return turns

        def rope_(x, turns):
            moved = x.dim() == 2 and x.shape[-1] == width and id(turns) in late
            return rotate(x, late[id(turns)] if moved else turns)

        monkeypatch.setattr(Model, "_entry_turns", entry_turns)
        monkeypatch.setattr(ops, "rope_", rope_)

    return plant


def _no_ape(monkeypatch):
    original = Assembler._compressor

    def compressor(self, *args):
        made = original(self, *args)
        return dataclasses.replace(made, ape=made.ape * 0)

    monkeypatch.setattr(Assembler, "_compressor", compressor)


def _swap_halves(original, members, overlap):
    if overlap:
        kv, score = members.chunk(2, -1)
        members = torch.cat((*reversed(kv.chunk(2, -1)), *reversed(score.chunk(2, -1))), -1)
    return original(members, overlap)


def _no_overlap(original, members, overlap):
    if overlap:
        members = members.clone()
        members[:, : members.shape[1] // 2, members.shape[2] // 2 :] = -torch.inf
    return original(members, overlap)


def _no_relu(original, q, keys, weights):
    return torch.einsum("th,the->te", weights, q @ keys.transpose(-1, -2))


def _bias_in_weights(monkeypatch):
    original, weigh = Model._route, ops.route
    seen = []

    def route(self, w, scores, step):
        seen[:] = [w.bias]
        return original(self, w, scores, step)

    def weigh_biased(scores, *rest):
        return weigh(scores if seen[0] is None else scores + seen[0], *rest)

    monkeypatch.setattr(Model, "_route", route)
    monkeypatch.setattr(ops, "route", weigh_biased)


def _no_hash(monkeypatch):
    original = Model._route

    def route(self, w, scores, step):
        if w.tid2eid is not None:
            w = dataclasses.replace(w, tid2eid=None, bias=torch.zeros(scores.shape[1]))
        return original(self, w, scores, step)

    monkeypatch.setattr(Model, "_route", route)


def _interleave_groups(original, o, wo_a):
    groups = len(wo_a)
    mixed = o.flatten(1).unflatten(1, (-1, groups)).transpose(1, 2).reshape(o.shape)
    return original(mixed, wo_a)


def _identity_norm(original, x, weight, eps):
    return x if weight is None else original(x, weight, eps)


def _no_inverse(original, x, turns):
    return x if turns.is_conj() else original(x, turns)


MISTAKES = {
    "comb transposed": _op("expand", lambda f, r, y, p, c: f(r, y, p, c.transpose(1, 2))),
    "post without factor 2": _op(
        "hc_coefficients", lambda f, *a: (lambda pre, post, c: (pre, post / 2, c))(*f(*a))
    ),
    "comb through sigmoid": _op("sinkhorn", _comb_through_sigmoid),
    "Sinkhorn 3 iterations": _config(hc_sinkhorn_iters=3),
    "no YaRN": _config(yarn=None),
    "theta 1e4 everywhere": _config(compress_rope_theta=1e4),
    "half-split rope": _op("rope_", _half_split),
    "no inverse rope": _op("rope_", _no_inverse),
    "no sink": _op("sink_attention", lambda f, q, k, m, s: f(q, k, m, s * 0 - 1e9)),
    "no q head norm": _op("rms_norm", _identity_norm),
    "window +1": _config(sliding_window=17),
    "entry visible one early": _visible(1),
    "entry visible one late": _visible(-1),
    "entry position = last token": _entry_position_last(32),
    "index key position = last token": _entry_position_last(16),
    "ape missing": _no_ape,
    "overlap halves swapped": _op("pool_entries", _swap_halves),
    "no overlap at group>0": _op("pool_entries", _no_overlap),
    "index no relu": _op("index_scores", _no_relu),
    "gate bias in weights": _bias_in_weights,
    "hash ignored": _no_hash,
    "no swiglu clamp": _config(swiglu_limit=1e9),
    "no routed scaling": _config(routed_scaling_factor=1.0),
    "softplus without sqrt": _op("sqrt_softplus", lambda f, x: f(x).square()),
    "o groups interleaved": _op("grouped_output", _interleave_groups),
}


def _difference(name):
    golden = ORACLE / name
    tensors = load_file(golden / "golden.safetensors")
    logits = run(load(golden), tensors["input_ids"])["logits"]
    return float((logits - tensors["logits"]).abs().max())


@pytest.mark.parametrize("name", MISTAKES)
def test_the_golden_sees_the_mistake(name, monkeypatch):
    """Each mistake moves some logit of the V4 golden by more than ten times its tolerance."""
    MISTAKES[name](monkeypatch)

    assert _difference("golden_tiny") > SEEN


V41_MISTAKES = {
    "q head norm applied": lambda m: m.setattr(Model, "_attend", _normed_queries(Model._attend)),
    "pair not pooled by its gate": _op(
        "pool_entries", lambda f, members, overlap: members.chunk(2, -1)[0].mean(1)
    ),
    "entry position = last token": _entry_position_last(32),
    "entry visible one early": _visible(1),
    "first pre is zero": lambda m: m.setattr(Model, "_begin", _zero_first_pre(Model._begin)),
}


def _normed_queries(original):
    def attend(self, layer, sink, q, k, step):
        return original(self, layer, sink, ops.rms_norm(q, None, 1e-6) * self._scale, k, step)

    return attend


def _zero_first_pre(original):
    def begin(self, *args):
        self._first_pre = torch.zeros_like(self._first_pre)
        return original(self, *args)

    return begin


@pytest.mark.parametrize("name", V41_MISTAKES)
def test_the_v41_golden_sees_the_mistake(name, monkeypatch):
    """The same for what is V4.1's own."""
    V41_MISTAKES[name](monkeypatch)

    assert _difference("golden_v41_degenerate_r2") > SEEN
