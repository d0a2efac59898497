"""The bytes of a decoding step, counted on models that run, and the tables of a profile."""

import sys
from pathlib import Path

import pytest
from small_models import SMALL

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from roofline import PARTS, Kernel, Retiled, profile_tables, step_bytes

from reproduction.benchmarking.decoding import Generation, state_size
from statecut.models import create

BATCH = 3


@pytest.mark.parametrize("name", ["delta_net", "delta_net_tied", "shared_head", "gated"])
def test_a_step_reads_weights_once_and_moves_the_states_twice(name):
    model = create(SMALL[name], seed=1).eval()
    generation = Generation(model, BATCH, 5)
    found = step_bytes(generation)
    assert set(found) == set(PARTS)
    state = state_size(model).value
    assert found["recurrent_state"] + found["conv_state"] == 2 * BATCH * state * 2**20
    sizes = {name: 4 * weight.numel() for name, weight in model.named_parameters()}
    hidden, vocabulary = SMALL[name]["hidden_size"], SMALL[name]["vocab_size"]
    table = sizes.pop("model.embeddings.weight")
    assert ("lm_head.weight" in sizes) == (name != "delta_net_tied")
    sizes.setdefault("lm_head.weight", table)  # read whole for the logits, tied or not
    assert found["weights"] == sum(sizes.values()) + BATCH * 4 * hidden
    assert found["logits"] == 2 * BATCH * 4 * vocabulary


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_profile_accounts_for_the_whole_step():
    kernels = [
        Kernel("fused_recurrent_delta_rule_fwd_kernel", 24, 4.0),
        Kernel("nvjet_tst_128x8_64x12", 168, 1.0),
        Kernel("cublasLt::splitKreduce_kernel<32>", 24, 0.5),
        Kernel("layer_norm_fwd_kernel", 73, 0.25),
        Kernel("Memcpy DtoD (Device -> Device)", 0.75, 0.125),
    ]
    parts = {"weights": 3e9, "recurrent_state": 12e9, "conv_state": 0, "logits": 0}
    lines = list(profile_tables(kernels, parts, step_ms=8.0, bandwidth=4e12))
    by_part = {name: found for name, *found in map(cells, lines[2 : lines.index("")])}
    assert by_part["weights"] == ["3.00", "0.750", "1.500", "50", "19"]
    assert by_part["recurrent_state"] == ["12.00", "3.000", "4.000", "75", "50"]
    assert sum(float(found[2]) for found in by_part.values()) == pytest.approx(8.0, abs=0.002)
    assert float(by_part["between kernels"][2]) == pytest.approx(8.0 - 5.875, abs=0.001)
    assert float(by_part["put back for the next replay"][2]) == 0.125


def test_other_tiles_cover_the_same_values():
    launched = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *args, **given: launched.append((grid, given))

    heads, values = 5, 100
    for rows in (8, 32, 128):
        Retiled(Kernel(), rows, 2)[(heads * 13,)](V=values, BV=8, num_warps=1, K=16)
        (programs,), given = launched[-1]
        assert programs == heads * -(-values // rows)
        assert given == {"V": values, "BV": rows, "num_warps": 2, "K": 16}
