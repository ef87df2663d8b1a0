from pathlib import Path

import pytest

from fxpipe.cost.table import CostTable, NodeCost
from fxpipe.errors import CostError

TABLE = CostTable(
    {
        "x": NodeCost(output_bytes=2048),
        "fc1": NodeCost(4_000_000, 3 << 20, 1 << 20, 2048, 1.5e-6, 3e-6, trainable=True),
        "fc2": NodeCost(6_000_000, 1 << 20, 1 << 19, 4096, 0.1 + 0.2, 1 / 3, trainable=True),
    }
)


def test_a_table_prints_its_nodes_in_order_and_their_sum(golden):
    golden(str(TABLE))


def test_a_saved_table_is_read_back_to_the_bit(tmp_path: Path):
    TABLE.save(tmp_path / "costs.json")
    again = CostTable.load(tmp_path / "costs.json")
    assert again == TABLE
    assert list(again) == list(TABLE)


def test_a_saved_table_has_one_line_a_node(tmp_path: Path):
    TABLE.save(tmp_path / "costs.json")
    lines = (tmp_path / "costs.json").read_text().splitlines()
    assert lines[2].startswith('  "fc1": {"flops": 4000000, "moved_bytes": 3145728,')


def test_a_sum_may_be_over_some_nodes():
    assert TABLE.total(["x", "fc1"]).output_bytes == 4096
    assert TABLE.total([]) == NodeCost()
    assert TABLE.total().flops == 10_000_000
    assert TABLE.total().trainable is True


@pytest.mark.parametrize(
    "text", ["", "[]", '{"nodes": 3}', '{"nodes": {"fc": {"colour": 1}}}', '{"costs": {}}']
)
def test_a_file_that_is_no_table_is_reported(tmp_path: Path, text: str):
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(CostError, match="the file holds no cost table") as caught:
        CostTable.load(path)
    assert caught.value.at == str(path)
