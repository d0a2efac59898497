"""Greedy generation: a replayed step writes what plain steps write.

No test has a GPU. A graph is played by a list of the operations that ran while it was captured:
undone at the end, as a capture runs nothing, and run again on the same memory by a replay.
"""

from contextlib import contextmanager
from typing import ClassVar

import pytest
import torch
from evaluation_runs import TEXT, make_model
from lm_eval.api.instance import Instance
from small_models import SMALL
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from reproduction import generation
from reproduction.generation import GenerationGraph, GreedyGeneration, generate
from reproduction.suites import language_model
from reproduction.suites.language_model import LanguageModel
from statecut.models.checkpoint import create


def tensors(values):
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


class Recorded(TorchDispatchMode):
    """Stands for a CUDA graph."""

    made: ClassVar[list] = []

    def __init__(self):
        super().__init__()
        self.steps, self.before, self.replays = [], [], 0
        self.made.append(self)

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if operation._schema.is_mutable:
            self.before += [(value, value.clone()) for value in tensors([args, kwargs])]
        out = operation(*args, **kwargs)
        self.steps.append((operation, args, kwargs, out))
        return out

    def undo(self):
        for value, was in reversed(self.before):
            value.copy_(was)

    @torch.inference_mode()
    def replay(self):
        self.replays += 1
        for operation, args, kwargs, out in self.steps:
            new = operation(*args, **kwargs)
            for place, value in zip(tensors(out), tensors(new), strict=True):
                if place.data_ptr() != value.data_ptr():
                    place.copy_(value)


@contextmanager
def recording(graph):
    with graph:
        yield
    graph.undo()


@pytest.fixture
def graphs(monkeypatch):
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recorded)
    monkeypatch.setattr(torch.cuda, "graph", recording)
    monkeypatch.setattr(Recorded, "made", [])
    return Recorded.made


def in_place(monkeypatch):
    """As fla's kernel does it, and the function in its place on a CPU does not."""
    from fla.modules.causal_conv1d import ops

    update = ops.causal_conv1d_update

    def updated(*, cache, **given):
        y, state = update(cache=cache, **given)
        return y, cache.copy_(state)

    monkeypatch.setattr(ops, "causal_conv1d_update", updated)


def prompted(name):
    """A model with the state and the last token of three prompts."""
    model = create(SMALL[name], seed=1).eval()
    ids = torch.randint(0, 97, (3, 7), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        out = model(ids, use_cache=True)
        return ids, model, out.past_key_values, out.logits[:, -1:].argmax(-1)


def recomputed(model, ids, count):
    """The tokens after the first, from the whole prefix each time, and the logit of each."""
    found, logits = [], []
    with torch.inference_mode():
        for _ in range(count + 1):
            best = model(ids).logits[:, -1:].max(-1)
            ids = torch.cat([ids, best.indices], 1)
            found.append(best.indices)
            logits.append(best.values)
    return torch.cat(found[1:], 1), torch.cat(logits[1:], 1)


@pytest.mark.parametrize("name", ["delta_net", "gated", "shared_head"])
@pytest.mark.parametrize("tokens", [1, 3])
def test_replays_write_what_plain_steps_write(name, tokens, graphs, monkeypatch):
    ids, *prompt = prompted(name)
    in_place(monkeypatch)
    expected, logits = recomputed(prompt[0], ids, 4 * tokens)
    assert len(expected.unique()) > 6
    going = GreedyGeneration(*prompt)
    found = [[part.clone() for part in going.run(tokens)]]
    graph = GenerationGraph(going, tokens)
    for _ in range(3):
        found.append([part.clone() for part in graph.replay()])
    assert torch.equal(torch.cat([part for part, _ in found], 1), expected)
    torch.testing.assert_close(torch.cat([part for _, part in found], 1), logits)
    assert graphs[0].replays == 3


# As the evaluation uses it


class Elsewhere(torch.Tensor):
    """A tensor that says it lies on a GPU."""

    is_cuda = True


def on_a_gpu(monkeypatch):
    """`generate` believes that it is on one, where every sequence takes a byte."""

    def generated(model, state, last, mask=None):
        return generate(model, state, last.as_subclass(Elsewhere), mask)

    monkeypatch.setattr(language_model, "generate", generated)
    monkeypatch.setattr(generation, "memory_of", lambda run: (out := run(), len(out[0])))
    monkeypatch.setattr(generation, "is_free", lambda taken: True)


def asked(text, limit):
    settings = {"until": ["\0"], "max_gen_toks": limit, "do_sample": False}
    return Instance("generate_until", {}, (text, settings), 0, ("t", 0, 1))


def test_each_batch_of_prompts_is_one_graph_and_ends_with_its_texts(tmp_path, graphs, monkeypatch):
    lm = LanguageModel(make_model(tmp_path), window=60)
    lm.batch = 2
    requests = [asked(TEXT[:40], 9), asked(TEXT[40:60], 3), asked(TEXT[60:70], 2), asked("a", 1)]
    expected = lm.generate_until(requests)
    assert not graphs
    on_a_gpu(monkeypatch)
    assert lm.generate_until(requests) == expected
    # The first token comes with the prompt, the second from a plain step.
    assert [graph.replays for graph in graphs] == [7]
    assert not lm.non_finite


def test_a_graph_whose_logits_are_no_numbers_is_noticed(tmp_path, graphs, monkeypatch):
    lm = LanguageModel(make_model(tmp_path), window=60)
    on_a_gpu(monkeypatch)
    replay = Recorded.replay

    def spoilt(graph):
        if graph.replays == 1:
            lm.model.lm_head.weight.data.fill_(float("nan"))
        replay(graph)

    monkeypatch.setattr(Recorded, "replay", spoilt)
    lm.generate_until([asked("the state", 6)])
    assert lm.non_finite


def test_without_memory_for_a_graph_steps_are_launched(tmp_path, graphs, monkeypatch):
    lm = LanguageModel(make_model(tmp_path), window=60)
    requests = [asked(" ".join(TEXT.split()[:n]), 5) for n in range(3, 11)]
    expected = lm.generate_until(requests)
    on_a_gpu(monkeypatch)
    monkeypatch.setattr(generation, "is_free", lambda taken: taken <= 2)  # bytes, one a sequence
    assert lm.generate_until(requests) == expected
    assert not graphs
    lm.batch = 2
    assert lm.generate_until(requests) == expected
    assert len(graphs) == 4
