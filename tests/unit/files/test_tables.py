"""Files of every kind come row by row, in order, with a place for each row and little memory."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moored.analysis.diagnose import LookOptions, draw
from moored.analysis.rewards import read_rewards
from moored.errors import MooredError
from moored.files import tables
from moored.files.formats import read_records
from moored.files.records import BadRow, ReadOptions
from moored.files.tables import Table, expand, find_kind, open_table
from moored.runlog.parquet import parquet_rows


def write(file: Path, content: str | bytes) -> Path:
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return file


def rows_of(file: Path) -> list:
    return [row for _, row in Table(file, find_kind(file), {}).rows([])]


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        ('{"a": 1}', "JSON lines"),
        ('\ufeff\n {"a": 1}', "JSON lines"),
        ('\n [{"a": 1}]', "JSON"),
        ('{"columns": ["a"], "data": [[1]]}', "JSON"),
        ('{"columns": 3}', "JSON lines"),
        (gzip.compress(b'{"a": 1}'), "JSON lines"),
        ("a,b\n1,2\n", "CSV"),
        ("PAR1", "Parquet"),
    ],
)
def test_the_kind_is_seen_from_the_content(tmp_path, content, kind):
    assert find_kind(write(tmp_path / "misleading.csv", content)) == kind


def test_rows_have_their_place_and_columns_are_those_of_whole_rows(tmp_path):
    file = write(tmp_path / "a", '{"a"\n\n\ufeff{"a": 1, "b": "x", "c": true}\n3\n{"a"')
    table = open_table(file)
    first, whole, other, last = table.rows([])
    assert [where.rpartition(", ")[2] for where, _ in (first, whole, other, last)] == [
        *("line 1", "line 3", "line 4", "line 5")
    ]
    assert whole[1] == {"a": 1, "b": "x", "c": True}
    bad = [row for _, row in (first, other, last)]
    assert all(isinstance(row, BadRow) for row in bad)
    assert [row.is_torn for row in bad if isinstance(row, BadRow)] == [False, False, True]
    assert table.columns == {"a": True, "b": False, "c": False}


def test_columns_that_the_first_rows_lack_or_leave_empty_are_found_in_the_next(tmp_path):
    rows = [{"prompt": "a"}, {"prompt": "b", "reward": None}, {"prompt": "c", "reward": 1}]
    file = write(tmp_path / "a", "".join(json.dumps(row) + "\n" for row in rows))
    assert open_table(file).columns == {"prompt": False, "reward": True}
    assert open_table(write(file, "p,r\na,\nb,1\n")).columns == {"p": False, "r": True}


@pytest.mark.parametrize("sign", [";", "\t"])
def test_columns_of_a_csv_may_be_separated_by_other_signs(tmp_path, sign):
    file = write(tmp_path / "a", f'\n\ufeffa{sign}b\n"1, 2"{sign}3\n')
    assert rows_of(file) == [{"a": "1, 2", "b": "3"}]


def test_deeply_nested_lines_are_bad_rows(tmp_path):
    (row,) = rows_of(write(tmp_path / "a", '{"a":' + "[" * 200_000 + "\n"))
    assert isinstance(row, BadRow) and not row.is_torn


def test_a_cut_last_line_of_a_table_is_torn_and_a_short_one_is_not(tmp_path):
    file = write(tmp_path / "a.csv", '\ufeffa,b\n"1\n2",3\n\n4\n5')
    whole, short, torn = rows_of(file)
    assert whole == {"a": "1\n2", "b": "3"}
    assert [short.is_torn, torn.is_torn] == [False, True]
    assert short.where.endswith("line 5") and "1 fields instead of 2" in short.why


@pytest.mark.parametrize("line", [b"3,\xff\n", b"3," + 200_000 * b"x"])
def test_a_line_that_is_no_table_is_named(tmp_path, line):
    with pytest.raises(MooredError, match="line 3 is neither JSON nor CSV"):
        rows_of(write(tmp_path / "a.csv", b"a,b\n1,2\n" + line))


def test_columns_of_token_ids_come_as_arrays(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    ids = [[k] * (k % 3) for k in range(600)]
    pq.write_table(pa.table({"ids": ids, "k": range(600)}), tmp_path / "a")
    rows: list[Any] = list(parquet_rows(tmp_path / "a", ["ids", "k"], arrays=("ids",)))
    assert all(isinstance(row["ids"], np.ndarray) for _, row in rows)
    assert [row["ids"].tolist() for _, row in rows] == ids
    assert rows[599][0].endswith("row 600") and rows[599][1]["k"] == 599


def test_folders_give_their_files_in_the_order_of_steps(tmp_path):
    for name in ("2.jsonl", "10.jsonl", "9.jsonl", "notes.txt", "1.csv"):
        write(tmp_path / name, "")
    assert [file.stem for file in expand([tmp_path])] == ["1", "2", "9", "10"]


def test_an_empty_file_of_a_folder_is_passed_by_unless_all_are(tmp_path):
    for name in ("1.jsonl", "2.jsonl"):
        write(tmp_path / name, "")
    assert [file.stem for file in expand([tmp_path])] == ["1", "2"]
    write(tmp_path / "1.jsonl", "{}")
    assert [file.stem for file in expand([tmp_path])] == ["1"]


def test_of_a_run_directory_only_its_rollouts_are_taken(tmp_path):
    for name in ("config.yaml", "metrics.jsonl", "collapse.jsonl"):
        write(tmp_path / name, "{}")
    with pytest.raises(MooredError, match=r"stored no rollouts; set log\.rollouts_every"):
        expand([tmp_path])
    (tmp_path / "rollouts").mkdir()
    file = write(tmp_path / "rollouts" / "step_000001.parquet", "")
    assert expand([tmp_path]) == [file]


def test_a_warm_start_has_no_rollouts_that_an_option_could_store(tmp_path):
    run = tmp_path / "warm start"
    run.mkdir()
    write(run / "config.yaml", "command: sft\n")
    write(run / "metrics.jsonl", "")
    with pytest.raises(MooredError, match=r"is a warm start, .* no rollouts are stored") as caught:
        expand([run])
    assert f"`moored report '{run}'`" in str(caught.value)


def test_of_the_output_folder_of_a_trainer_its_completions_are_taken(tmp_path):
    (tmp_path / "completions").mkdir()
    (tmp_path / "checkpoint-10").mkdir()
    write(tmp_path / "trainer_log.csv", "loss")
    file = write(tmp_path / "completions" / "completions_00010.parquet", "")
    assert expand([tmp_path]) == [file]


def test_a_folder_without_rollouts_names_folders_below_it_that_have_some(tmp_path):
    with pytest.raises(MooredError, match=r"holds no \.parquet .* file; give rollout files"):
        expand([tmp_path])
    (tmp_path / "dumps").mkdir()
    write(tmp_path / "dumps" / "1.jsonl", "")
    with pytest.raises(MooredError, match=r"name a folder below it: .*dumps"):
        expand([tmp_path])


def test_a_misspelt_path_is_answered_with_the_nearest_name(tmp_path):
    write(tmp_path / "rollouts.jsonl", "")
    with pytest.raises(MooredError, match=r"does not exist; did you mean '.*rollouts\.jsonl'\?"):
        expand([tmp_path / "rolouts.jsonl"])
    with pytest.raises(MooredError, match=r"does not exist; .* holds rollouts\.jsonl"):
        expand([tmp_path / "x"])
    with pytest.raises(MooredError, match="nor does its folder"):
        expand([tmp_path / "runs" / "nope"])


def test_fields_of_a_csv_that_read_as_numbers_are_numbers(tmp_path):
    table = open_table(write(tmp_path / "a.csv", "a,b,c\n1.5,x,\n"))
    assert table.columns == {"a": True, "b": False, "c": False}


NUM_ROWS, NUM_CHARS = 10_000, 2000


def long_rows():
    """20 MB that do not compress: 10 steps of 20 prompts, 50 replies each."""
    rng = np.random.default_rng(0)
    for k in range(NUM_ROWS):
        text = rng.integers(33, 91, NUM_CHARS, dtype=np.uint8).tobytes().decode()
        prompt = f"task {k % 20}"
        yield {"step": k // 1000, "prompt": prompt, "completion": text + "</think>", "reward": 1.0}


@pytest.fixture(scope="module")
def long_lines(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("long") / "rollouts.jsonl"
    with file.open("w") as stream:
        for row in long_rows():
            stream.write(json.dumps({**row, "response": row.pop("completion")}) + "\n")
    return file


@pytest.fixture(scope="module")
def long_parquet(tmp_path_factory) -> Path:
    """All in one row group, as pandas writes it."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    file = tmp_path_factory.mktemp("long") / "rollouts.parquet"
    pq.write_table(pa.Table.from_pylist(list(long_rows())), file)
    return file


def advise(file: Path) -> int:
    return len(read_rewards([file]).rewards)


def diagnose(file: Path) -> int:
    options = LookOptions(num_prompts=4, num_pairs=8)
    drawn = draw(read_records(file, ReadOptions()), options)
    return sum(step.num_rows for step in drawn.looks)


@pytest.mark.parametrize("read", [advise, diagnose])
def test_json_lines_are_read_in_a_twentieth_of_their_size(long_lines, read):
    assert long_lines.stat().st_size > NUM_ROWS * NUM_CHARS
    tracemalloc.start()
    assert read(long_lines) == NUM_ROWS
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < NUM_ROWS * NUM_CHARS / 20


@pytest.mark.parametrize("read", [advise, diagnose])
def test_parquet_is_never_fetched_whole(long_parquet, read):
    assert long_parquet.stat().st_size > 0.8 * NUM_ROWS * NUM_CHARS
    code = f"""
import sys
from pathlib import Path
import pyarrow
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_tables import {read.__name__} as read
print(read(Path({str(long_parquet)!r})), pyarrow.default_memory_pool().max_memory())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    num_rows, peak = map(int, done.stdout.split())
    assert num_rows == NUM_ROWS
    assert 0 < peak < NUM_ROWS * NUM_CHARS / 2


ROWS = [{"prompt": f"p{k % 2}", "response": f"<think>{k}</think>", "reward": k} for k in range(4)]


@pytest.mark.parametrize(
    "content",
    [
        gzip.compress("".join(json.dumps(row) + "\n" for row in ROWS).encode()),
        json.dumps(ROWS, indent=1).encode(),
        gzip.compress(json.dumps(ROWS).encode()),
        json.dumps({"columns": [*ROWS[0]], "data": [[*row.values()] for row in ROWS]}).encode(),
        json.dumps(
            {"_type": "table", "data": [[*row.values()] for row in ROWS], "columns": [*ROWS[0]]}
        ).encode(),
    ],
)
def test_packed_lines_lists_and_tables_of_wandb_hold_the_same_rows(tmp_path, content):
    file = write(tmp_path / "rows", content)
    table = open_table(file)
    assert [row for _, row in table.rows([])] == ROWS
    assert table.columns == {"prompt": False, "response": False, "reward": True}
    assert list(read_rewards([file]).rewards) == [0, 1, 2, 3]


def test_packed_lines_and_tables_of_wandb_are_found_in_folders(tmp_path):
    for name in ("b.jsonl.gz", "a.table.json", "config.json"):
        write(tmp_path / name, b"[]")
    assert [file.name for file in expand([tmp_path])] == ["a.table.json", "b.jsonl.gz"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1", "not JSON.*whole"),
        ('{"columns": ["a"], "rows": [[1]]}', "columns and data"),
        (gzip.compress(b'{"a": 1}' * 1000)[:-20], "not a whole gzip"),
        (gzip.compress(b"PAR1"), "unpack it first"),
        (b"PK\x03\x04", "unpack it first"),
    ],
)
def test_json_and_packed_files_that_are_not_whole_are_refused(tmp_path, content, message):
    with pytest.raises(MooredError, match=message):
        open_table(write(tmp_path / "rows", content))


def test_rows_of_a_list_or_table_that_are_none_are_bad(tmp_path):
    file = write(tmp_path / "a", '{"columns": ["a", "b"], "data": [[1, 2], [3], 4]}')
    good, *bad = rows_of(file)
    assert good == {"a": 1, "b": 2} and all(isinstance(row, BadRow) for row in bad)
    good, bad = rows_of(write(tmp_path / "b", '[{"a": 1}, 7]'))
    assert good == {"a": 1} and isinstance(bad, BadRow)


def test_lines_and_lists_without_an_end_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "MOST_LINE_BYTES", 1000)
    monkeypatch.setattr(tables, "MOST_JSON_BYTES", 1000)
    for start in ('{"a": "', "a,b\n", "["):
        for pack in (bytes, gzip.compress):
            file = write(tmp_path / "a", pack(start.encode() + b"x" * 2000))
            with pytest.raises(MooredError, match=r"more than .* MB"):
                rows_of(file)


def test_a_pipe_and_a_device_are_refused_without_being_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for file in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(MooredError, match="no regular file"):
            open_table(file)
        with pytest.raises(MooredError, match="no regular file"):
            read_rewards([file])


def bomb(file: Path, kind: str) -> Path:
    """A few kilobytes that unpack to 4.5 GB, in one of the ways that Parquet has."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    num_rows, text = 4500, "a" * 1_000_000
    if kind == "equal texts":
        column = pa.DictionaryArray.from_arrays(pa.array([0] * num_rows, pa.int32()), [text])
    elif kind == "packed texts":
        num_rows, column = 300, pa.array([text] * 300)
    else:
        num_rows = 60
        values = pa.array(np.zeros(60_000_000, dtype=np.int32))
        column = pa.FixedSizeListArray.from_arrays(values, 1_000_000)
    prompts = pa.array([f"p{k % 4}" for k in range(num_rows)])
    found = pa.table({"prompt": prompts, "response": column})
    packed = kind == "packed texts"
    options = {"compression": "zstd", "use_dictionary": False} if packed else {}
    pq.write_table(found, file, store_schema=False, **options)
    assert file.stat().st_size < 300_000
    return file


@pytest.mark.parametrize("kind", ["equal texts", "packed texts", "equal numbers"])
def test_a_small_parquet_that_unpacks_to_gigabytes_is_refused_in_little_memory(tmp_path, kind):
    pa = pytest.importorskip("pyarrow")
    file = bomb(tmp_path / "a.parquet", kind)
    before = pa.total_allocated_bytes()
    rows = Table(file, "Parquet", dict.fromkeys(["prompt", "response"], False)).rows(
        ["prompt", "response"]
    )
    with pytest.raises(MooredError, match="unpacks to more than"):
        for _ in rows:
            assert pa.total_allocated_bytes() - before < 300e6
