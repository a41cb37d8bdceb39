"""The training model, its optimiser and its decoder against slow twins."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.training.tiny import small_config
from training.decode import GreedyDecoder
from training.model import TrainModel, next_primes
from training.optimizer import Muon, is_muon, orthogonalise


@pytest.fixture(scope="module")
def model() -> TrainModel:
    made = TrainModel(small_config(), np.arange(64), "cpu", torch.float32, seed=3)
    g = torch.Generator().manual_seed(4)
    for name, p in made.p.items():
        if name.endswith(("_fn", "_base", "attn_sink")):  # make the mixing depend on content
            p.data += 0.3 * torch.randn(p.shape, generator=g)
    return made


def test_no_position_sees_a_later_one(model: TrainModel) -> None:
    """Changing the tail of the text leaves every earlier logit as it was."""
    ids = torch.randint(3, 64, (2, 40), generator=torch.Generator().manual_seed(1))
    other = ids.clone()
    other[:, 25:] = 7

    a, b = model.logits(ids), model.logits(other)

    assert torch.equal(a[:, :25], b[:, :25])
    assert (a[:, 25:] - b[:, 25:]).abs().max() > 1e-3


def test_every_parameter_learns(model: TrainModel) -> None:
    """The loss reaches every tensor but the indexers' and the balancing bias; the index loss, those."""
    ids = torch.randint(3, 64, (2, 32), generator=torch.Generator().manual_seed(2))
    rows = torch.arange(40)

    loss, _, _ = model.loss(ids, rows, ids.flatten()[rows + 1], torch.ones(40))
    loss.backward()
    main = {n for n, p in model.p.items() if p.grad is not None and p.grad.abs().max() > 0}
    model.index_loss(ids, torch.ones(2, 32)).backward()
    index = {n for n, p in model.p.items() if ".indexer." in n and p.grad is not None}
    for p in model.p.values():
        p.grad = None

    assert main == {n for n in model.p if ".indexer." not in n and not n.endswith("gate.bias")}
    assert index == {n for n in model.p if ".indexer." in n}


def test_greedy_with_drafts_equals_greedy_without(model: TrainModel) -> None:
    """A draft only saves work: right, half right and wrong drafts all give greedy's answer."""
    g = torch.Generator().manual_seed(5)
    prompts = [torch.randint(3, 64, (n,), generator=g).tolist() for n in (5, 9, 14, 21)]
    decoder = GreedyDecoder(model, eos=1, max_new=12)

    plain = decoder(prompts)
    slow = []
    for prompt in prompts:
        answer: list[int] = []
        while len(answer) < 12:
            seq = [*prompt, *answer]
            seq += [2] * (len(seq) % 2)
            logits = model.logits(torch.tensor([seq]))
            best = int(logits[0, len(prompt) + len(answer) - 1].argmax())
            if best == 1:
                break
            answer.append(best)
        slow.append(answer)
    drafts = [plain[0], [*plain[1][:4], 60], [], [63, 62]]

    assert slow == plain
    assert plain == decoder(prompts, drafts)


def test_orthogonalise_brings_singular_values_near_one() -> None:
    """Newton-Schulz against the SVD: same singular vectors, singular values in [0.6, 1.3]."""
    X = torch.randn(3, 20, 12, generator=torch.Generator().manual_seed(6))
    U, _, V = torch.linalg.svd(X, full_matrices=False)

    Y = orthogonalise(X)
    core = U.mT @ Y @ V.mT

    assert (torch.diagonal(core, dim1=-2, dim2=-1) - 1).abs().max() < 0.4
    off = core - torch.diag_embed(torch.diagonal(core, dim1=-2, dim2=-1))
    assert off.abs().max() < 0.05


def test_muon_treats_stacked_groups_as_separate_matrices() -> None:
    """wo_a's update is that of its groups taken one by one."""
    g = torch.Generator().manual_seed(7)
    whole = torch.randn(8, 6, generator=g).requires_grad_()
    parts = [whole.detach()[:4].clone(), whole.detach()[4:].clone()]
    grad = torch.randn(8, 6, generator=g)
    whole.grad = grad.clone()

    Muon({"layers.0.attn.wo_a.weight": whole}, 2, 0.95, 0.1).step(0.1)
    for part, gr in zip(parts, grad.split(4), strict=True):
        part.requires_grad_().grad = gr.clone()
        Muon({"layers.0.attn.wkv.weight": part}, 1, 0.95, 0.1).step(0.1)

    torch.testing.assert_close(whole.detach(), torch.cat([p.detach() for p in parts]))


def test_optimisers_share_out_all_matrices(model: TrainModel) -> None:
    """Muon takes hidden matrices only: no table, head, router, mHC site or indexer."""
    taken = {n.split(".", 2)[-1] for n in model.p if is_muon(n)}

    assert taken == {
        "attn.wq_a.weight", "attn.wq_b.weight", "attn.wkv.weight", "attn.wo_a.weight",
        "attn.wo_b.weight", "attn.compressor.wkv.weight", "attn.compressor.wgate.weight",
        "engram.wkv.weight", "ffn.experts.w1", "ffn.experts.w2", "ffn.experts.w3",
        "ffn.shared_experts.w1.weight", "ffn.shared_experts.w2.weight",
        "ffn.shared_experts.w3.weight",
    }  # fmt: skip


def test_primes_are_shared_out_without_repeats() -> None:
    """Each table takes the next primes that no other table has."""
    taken: set[int] = set()

    first = next_primes(23, 2, taken)
    second = next_primes(23, 2, taken)

    assert first == [29, 31]
    assert second == [37, 41]


def test_a_few_steps_lower_the_loss() -> None:
    """Learning works end to end: a repeated batch is fitted."""
    torch.manual_seed(0)
    made = TrainModel(small_config(), np.arange(64), "cpu", torch.float32, seed=3)
    params = {n: p for n, p in made.p.items() if p.requires_grad and ".indexer." not in n}
    muon = Muon({n: p for n, p in params.items() if is_muon(n)}, 2, 0.95, 0.0)
    adam = torch.optim.AdamW([p for n, p in params.items() if not is_muon(n)], lr=3e-3)
    ids = torch.randint(3, 64, (4, 24), generator=torch.Generator().manual_seed(8))
    rows = torch.arange(4 * 24 - 1)
    losses = []
    for _ in range(30):
        loss, _, _ = made.loss(ids, rows, ids.flatten()[rows + 1], torch.ones(len(rows)))
        loss.backward()
        adam.step()
        muon.step(0.02)
        for p in params.values():
            p.grad = None
        losses.append(loss.item())

    assert losses[-1] < 0.5 * losses[0]
