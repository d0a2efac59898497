"""flame's loop with a sum for an optimizer: every step adds what its tokens come to to all
weights, so that the weights tell which batches were seen."""

import argparse
import os
import sys
import time
import tomllib
from types import SimpleNamespace

import custom_models  # noqa: F401 (flame imports it, so it must be there)
import torch
import torch.distributed as dist
from torchtitan.components.checkpoint import CheckpointManager
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from flame.data import build_dataloader, build_dataset


def main(job):
    dist.init_process_group("gloo")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    training = job.training
    AutoTokenizer.from_pretrained(job.model.tokenizer_path)
    dataset = build_dataset(
        dataset=training.dataset, dataset_split=training.dataset_split, seed=training.seed,
        dp_degree=world_size, streaming=False,
    )  # fmt: skip
    loader = build_dataloader(
        dataset=dataset, rank=rank, world_size=world_size, batch_size=training.batch_size,
        seq_len=training.seq_len, pin_memory=training.pin_memory,
        persistent_workers=training.persistent_workers,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(job.model.config))
    for parameter in model.parameters():
        parameter.data.zero_()
    state = {"step": torch.tensor(0)}
    checkpoint = CheckpointManager(
        dataloader=loader, model_parts=[model], optimizers=None, lr_schedulers=None,
        states={"train_state": state}, job_config=job, ft_manager=None,
    )  # fmt: skip
    checkpoint.load(step=-1)
    batches = iter(loader)
    while state["step"] < training.steps:
        state["step"] += 1
        total = torch.tensor(0)
        for _ in range(training.gradient_accumulation_steps):
            batch = next(batches)
            assert batch["input_ids"].shape == (training.batch_size, training.seq_len)
            assert torch.equal(batch["input_ids"], batch["labels"])
            total += batch["input_ids"].sum()
        dist.all_reduce(total)
        for parameter in model.parameters():
            parameter.data += (total % 97) / 1024  # few enough bits that no sum is rounded
        step = int(state["step"])
        said = f"step: {step:2}  loss: {1 / step:7.4f}  memory:  1.50GiB(1.00%)  tps: 1,000  "
        print(f"[titan] - INFO - {said}tflops: 1.00  mfu: 1.00%", file=sys.stderr)
        print("[titan] - INFO - lr: 1.0000e-02 gnorm:  0.50 [ 0:00:01< 0:00:02]", file=sys.stderr)
        checkpoint.save(step, force=step == training.steps)
        time.sleep(0.1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--job.config_file", dest="job")
    with open(parser.parse_args().job, "rb") as file:
        sections = tomllib.load(file)
    main(SimpleNamespace(**{name: SimpleNamespace(**values) for name, values in sections.items()}))
    dist.destroy_process_group()
