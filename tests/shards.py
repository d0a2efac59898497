"""Models in several files."""

import json
import shutil

from safetensors.torch import save_file

from statecut.models.checkpoint import Checkpoint


def shard(folder, out):
    """The tensors of a folder in three files: neighbours by name are in different ones."""
    checkpoint = Checkpoint(folder)
    out.mkdir()
    files, size = {}, 0
    for i in range(3):
        file = f"model-0000{i + 1}-of-00003.safetensors"
        tensors = {n: checkpoint.tensor(n) for n in sorted(checkpoint.files)[i::3]}
        save_file(tensors, out / file, metadata={"format": "pt", "part": str(i)})
        files |= dict.fromkeys(tensors, file)
        size += sum(tensor.nbytes for tensor in tensors.values())
    about = {"total_size": size, "total_parameters": size // 4, "note": "kept"}
    index = {"metadata": about, "weight_map": files}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    shutil.copyfile(folder / "config.json", out / "config.json")
    return out
