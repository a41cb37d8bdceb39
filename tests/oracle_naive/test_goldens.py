"""The naive forward pass against logits of an independent reference, in fp32, unquantised."""

from pathlib import Path

import numpy as np
import orjson
import pytest
from safetensors.torch import load_file

from tests.oracle_naive.config import Config
from tests.oracle_naive.model import Naive
from tests.oracle_naive.names import official_config, official_tensors
from tests.oracle_naive.weights import from_tensors

DATA = Path(__file__).parents[1] / "data" / "oracle"


@pytest.mark.parametrize(
    "golden", ["golden_tiny", "golden_v41_degenerate_r1", "golden_v41_degenerate_r2"]
)
def test_naive_equals_the_golden_logits(golden: str) -> None:
    """V4 in full, V4.1 where it must equal V4; every position of both sequences."""
    folder = DATA / golden
    verify = orjson.loads((folder / "verify.json").read_bytes())
    hf = orjson.loads((folder / verify["config"]).read_bytes())
    config = Config.read(official_config(hf, verify["architecture"]))
    weights = from_tensors(official_tensors(load_file(folder / verify["weights"])))
    data = load_file(folder / verify["golden"])

    for ids, logits in zip(data["input_ids"].tolist(), data["logits"].numpy(), strict=True):
        np.testing.assert_allclose(
            Naive(config, weights, ids).logits(), logits, rtol=0, atol=verify["atol"]
        )
