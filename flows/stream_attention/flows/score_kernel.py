"""The source of one score launch: what a program does for a row, chunk of pages by chunk."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from stream_attention.flows.formats import BATCHED, RAGGED
from stream_attention.flows.graph import Node
from stream_attention.flows.graph_text import node_text
from stream_attention.flows.op_table import OPS
from stream_attention.flows.score_ops import Tile, Writer, emit, number, padded_size
from stream_attention.flows.score_phases import Phase, saved_before

MOST_COMBINED = 1024
"""Elements of partial results that are combined at once."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """Scratch of float32: `elements` for each page of a row, or for each chunk of one."""

    name: str
    per: str
    elements: int


class ScoreKernel:
    """One launch's source."""

    def __init__(self, writer: Writer, phase: Phase, dtypes: Mapping[str, str]) -> None:
        self.writer, self.phase, self.dtypes = writer, phase, dtypes
        self.graph, self.nodes = writer.graph, writer.graph.indexer.nodes
        self.name = f"score_{phase.number}"
        self.tiles: dict[int, Tile] = {}
        self.buffers: dict[str, Buffer] = {}
        used = {
            self.nodes[i].attribute("field")
            for i in (*phase.nodes, *self._saves())
            if self.nodes[i].op in ("load", "save") and i not in phase.loaded
        }
        self.fields = tuple(sorted(used))

    def _saves(self) -> tuple[int, ...]:
        return tuple(i for i in self.phase.nodes if self.nodes[i].op == "save")

    def build(self) -> list[str]:
        self._begin()
        for i in self.phase.nodes:
            if self.nodes[i].format is BATCHED or i in self.phase.combined:
                self._before(i)
        self._loop()
        for i in self.phase.nodes:
            if self.nodes[i].format is RAGGED:
                self._inside(i)
        for i in self.phase.kept:
            self._keep(i)
        for i in self.phase.partial:
            self._partial(i)
        self._end()
        return [*self._signature(), *self.writer.lines]

    def _signature(self) -> list[str]:
        names = ["scores", "q", *(f"f_{name}" for name in self.fields), *self.buffers]
        names += ["page_table", "sequence_lengths", "max_pages", "max_chunks"]
        names += ["q_request", "q_head", "table_request", "table_head"]
        names += ["length_request", "length_head"]
        for name in ("k", "v"):
            if name in self.fields:
                names += [f"{name}_page", f"{name}_token", f"{name}_head"]
        names += [
            f"{name}: tl.constexpr" for name in ("HEADS", "BOS", "EOS", "DOT_FP32", "DEPENDENT")
        ]
        return ["@triton.jit", f"def {self.name}(", *(f"    {name}," for name in names), "):"]

    def _begin(self) -> None:
        page_size, chunk = self.graph.page_size, self.writer.chunk
        for line in (
            "await_previous(DEPENDENT)",
            "row = tl.program_id(1)",
            "request, head = row // HEADS, row % HEADS",
            "at_length = request * length_request + head * length_head",
            "length = tl.load(sequence_lengths + at_length)",
            f"num_pages = (length + {page_size - 1}) // {page_size}",
            "first = tl.minimum(num_pages, BOS)",
            "last = tl.maximum(first, num_pages - EOS)",
            f"num_chunks = tl.cdiv(last - first, {chunk})",
            f"most_held = tl.minimum(tl.maximum(length - first * {page_size}, 0), {page_size})",
            "wide_row = row.to(tl.int64)",
        ):
            self.writer.write(line)

    def _loop(self) -> None:
        """The loop's head: while a chunk is computed, what the next one reads is on its way."""
        chunk, writer = self.writer.chunk, self.writer
        table = "page_table + request * table_request + head * table_head"
        stage = self._stage()
        for line in (
            "step = tl.num_programs(0)",
            f"position = first + tl.program_id(0) * {chunk} + tl.arange(0, {chunk})",
            "inside = position < last",
            f"page = tl.load({table} + position, mask=inside, other=0).to(tl.int64)",
            *stage,
            f"ahead = position + step * {chunk}",
            f"page_ahead = tl.load({table} + ahead, mask=ahead < last, other=0).to(tl.int64)",
            "for chunk in range(tl.program_id(0), num_chunks, step):",
        ):
            writer.write(line)
        writer.indent = " " * 8
        names = re.compile(rf"\b({'|'.join(self._staged)})\b")
        for line in (
            f"next_position = position + step * {chunk}",
            "next_inside = next_position < last",
            "next_page = page_ahead",
            *(names.sub(r"next_\1", line) for line in stage),
            f"ahead = next_position + step * {chunk}",
            f"page_ahead = tl.load({table} + ahead, mask=ahead < last, other=0).to(tl.int64)",
        ):
            writer.write(line)

    def _stage(self) -> list[str]:
        """Lines that load what a chunk reads, of `position`, `inside` and `page`."""
        page_size = self.graph.page_size
        self._staged = ["position", "inside", "inside_3", "page", "held", "slot"]
        lines = [
            "inside_3 = inside[:, None, None]",
            f"held = tl.where(inside, tl.minimum(length - position * {page_size}, {page_size}), 0)",
            "slot = (page * HEADS + head)[:, None, None]",
        ]
        for i in self.phase.nodes:
            node = self.nodes[i]
            if i in self.phase.loaded:
                at = self._page_buffer(i, node)
            elif node.op == "load" and saved_before(self.graph, i) is None:
                at = self._field_at(node)
            else:
                continue
            lines.append(f"raw_{i} = tl.load({at}, mask={self._mask(node)}, other=0.0)")
            self._staged.append(f"raw_{i}")
        return lines

    def _end(self) -> None:
        """The loop's end: what was loaded ahead is the next chunk's."""
        for name in self._staged:
            self.writer.write(f"{name} = next_{name}")

    def _comment(self, node_id: int) -> None:
        self.writer.write(f"# {node_text(node_id, self.nodes[node_id])}")

    def _offsets(self, node: Node, stride: str = "") -> str:
        """Offsets of a tile's lanes. stride: of its rows; row-major by default."""
        rows, cols = (self.writer.lanes(size) for size in node.shape)
        row_stride = stride or str(self.writer.size(node.shape[1]))
        return (
            f"tl.arange(0, {rows})[None, :, None] * {row_stride}"
            f" + tl.arange(0, {cols})[None, None, :]"
        )

    def _mask(self, node: Node) -> str:
        mask = self.writer.mask(node.shape, RAGGED)
        return f"inside_3 & {mask}" if mask else "inside_3"

    # --- before the loop: values of a row ---------------------------------------------------------

    def _before(self, node_id: int) -> None:
        node = self.nodes[node_id]
        self._comment(node_id)
        if node.op == "query":
            self._query(node_id, node)
        elif node_id in self.phase.combined:
            self._combine(node_id, node)
        else:
            self.tiles[node_id] = self._emitted(node_id, node)

    def _emitted(self, node_id: int, node: Node) -> Tile:
        return emit(self.writer, node, f"v{node_id}", [self.tiles[i] for i in node.operands])

    def _query(self, node_id: int, node: Node) -> None:
        group, lanes = self.writer.group_size, self.writer.group_lanes
        dims = self.writer.lanes("D")
        mask = self.writer.mask(node.shape, BATCHED)
        masked = f", mask={mask}, other=0.0" if mask else ""
        self.writer.write(
            f"at_q = (head * {group} + tl.arange(0, {lanes}))[None, :, None] * q_head"
            f" + tl.arange(0, {dims})[None, None, :]"
        )
        self.writer.write(f"raw_{node_id} = tl.load(q + request * q_request + at_q{masked})")
        self.writer.write(f"v{node_id} = raw_{node_id}.to(tl.float32)")
        raw = (f"raw_{node_id}", self.dtypes["q"])
        self.tiles[node_id] = Tile(f"v{node_id}", node.shape, BATCHED, True, raw)

    def _partial_of(self, node_id: int) -> tuple[Node, int, int, int]:
        """(operand, its lanes of rows and of cols, chunks combined at once) of a reduction."""
        operand = self.nodes[self.nodes[node_id].operands[0]]
        rows, cols = (self.writer.lanes(size) for size in operand.shape)
        return operand, rows, cols, max(1, min(64, MOST_COMBINED // (rows * cols)))

    def _chunk_buffer(self, kind: str, node_id: int, elements: int) -> str:
        name = f"{kind}_{node_id}"
        self.buffers[name] = Buffer(name, "chunk", elements)
        return name

    def _combine(self, node_id: int, node: Node) -> None:
        operand, rows, cols, block = self._partial_of(node_id)
        lanes, name = rows * cols, f"v{node_id}"
        base = f"wide_row * max_chunks * {lanes}"
        shape = f"[1, {rows}, {cols}]"
        write, rest = self.writer.write, f"num_chunks, {lanes}, {block}"
        if node.op == "softmax":
            maxima = self._chunk_buffer("maxima", node_id, lanes)
            masses = self._chunk_buffer("masses", node_id, lanes)
            write(f"{name}_m = combined_max({maxima} + {base}, {rest})")
            write(f'{name}_m = tl.where({name}_m == float("-inf"), 0.0, {name}_m)')
            both = f"{maxima} + {base}, {masses} + {base}, {name}_m"
            write(f"{name}_t = combined_mass({both}, {rest})")
            write(f"{name}_m = tl.reshape({name}_m, {shape})")
            write(f"{name}_t = tl.reshape(tl.where({name}_t == 0.0, 1.0, {name}_t), {shape})")
            return
        partial = self._chunk_buffer("partial", node_id, lanes)
        how = node.op if node.op in ("max", "min") else "sum"
        write(f"{name} = tl.reshape(combined_{how}({partial} + {base}, {rest}), {shape})")
        if node.op == "l2norm":
            write(f"{name} = tl.sqrt({name})")
        if node.op == "mean":
            write(f"{name} = {name} / {self._window_count(operand)}")
        if node.op != "normalize":
            self.tiles[node_id] = Tile(name, node.shape, BATCHED)

    def _window_count(self, operand: Node) -> str:
        """How many candidate pages hold each lane."""
        page_size, count = self.graph.page_size, "last - first"
        for axis, size in enumerate(operand.shape):
            if size == "P":  # all are full, but the request's last page
                where = "[None, :, None]" if axis == 0 else "[None, None, :]"
                tail = f"length - (last - 1) * {page_size}"
                count = f"({count} - (tl.arange(0, {padded_size(page_size)}){where} >= {tail}))"
        return f"tl.maximum({count}, 1).to(tl.float32)"

    # --- inside of the loop: values of a chunk's pages --------------------------------------------

    def _inside(self, node_id: int) -> None:
        node = self.nodes[node_id]
        self._comment(node_id)
        if node_id in self.phase.loaded:
            self.tiles[node_id] = Tile(f"raw_{node_id}", node.shape, RAGGED, True)
        elif node.op == "load":
            self._load(node_id, node)
        elif node.op == "save":
            self._save(node)
        elif node.op == "topk":
            score = self.tiles[node.operands[0]].name
            value = f"tl.reshape({score}, [{self.writer.chunk}])"
            at = "scores + wide_row * max_pages + position"
            self.writer.write(f"tl.store({at}, {value}, mask=inside)")
        elif node.op == "softmax":
            x, scale = self.tiles[node.operands[0]].name, number(node.attribute("scale"))
            name = f"v{node_id}"
            self.writer.write(f"{name} = tl.exp({scale} * {x} - {name}_m) / {name}_t")
            self.tiles[node_id] = Tile(name, node.shape, RAGGED)
        elif node.op == "normalize":
            x, name = self.tiles[node.operands[0]].name, f"v{node_id}"
            self.writer.write(f"{name}_x = tl.where({name} == 0.0, 0.0, {x} / {name})")
            self.tiles[node_id] = Tile(f"{name}_x", node.shape, RAGGED)
        else:
            self.tiles[node_id] = self._emitted(node_id, node)

    def _load(self, node_id: int, node: Node) -> None:
        name, before = f"v{node_id}", saved_before(self.graph, node_id)
        field = node.attribute("field")
        if before is not None:
            value = f"as_stored({self.tiles[before].name}, f_{field}.dtype.element_ty)"
            self.writer.write(f"{name} = as_float({value})")
            self.tiles[node_id] = Tile(name, node.shape, RAGGED)
            return
        self.writer.write(f"{name} = as_float(raw_{node_id})")
        raw = (f"raw_{node_id}", self.dtypes[field])
        self.tiles[node_id] = Tile(name, node.shape, RAGGED, True, raw)

    def _field_at(self, node: Node) -> str:
        field = node.attribute("field")
        if field in ("k", "v"):
            at = f"page[:, None, None] * {field}_page + head * {field}_head"
            return f"f_{field} + {at} + {self._offsets(node, f'{field}_token')}"
        rows, cols = (self.writer.size(size) for size in node.shape)
        return f"f_{field} + slot * {rows * cols} + {self._offsets(node)}"

    def _save(self, node: Node) -> None:
        field, value = node.attribute("field"), self.tiles[node.operands[0]].name
        rows, cols = (self.writer.size(size) for size in node.shape)
        stored = value
        if mask := self.writer.mask(node.shape, RAGGED):
            stored = f"tl.where({mask}, {value}, 0.0)"
        # Lanes of tokens that an unfinished page has not are written too, as 0.
        all_rows, all_cols = (1 if size == "P" else size for size in node.shape)
        keep = self.writer.mask((all_rows, all_cols), RAGGED)
        masked = f"inside_3 & {keep}" if keep else "inside_3"
        at = f"f_{field} + slot * {rows * cols} + {self._offsets(node)}"
        self.writer.write(f"stored = as_stored({stored}, f_{field}.dtype.element_ty)")
        self.writer.write(f"tl.store({at}, stored, mask={masked})")

    def _page_buffer(self, node_id: int, node: Node) -> str:
        rows, cols = (self.writer.size(size) for size in node.shape)
        name = f"kept_{node_id}"
        self.buffers[name] = Buffer(name, "page", rows * cols)
        places = f"((wide_row * max_pages + position) * {rows * cols})[:, None, None]"
        return f"{name} + {places} + {self._offsets(node)}"

    def _keep(self, node_id: int) -> None:
        node = self.nodes[node_id]
        at, name = self._page_buffer(node_id, node), self.tiles[node_id].name
        self.writer.write(f"tl.store({at}, {name}, mask={self._mask(node)})")

    def _partial(self, node_id: int) -> None:
        node = self.nodes[node_id]
        operand, rows, cols, _ = self._partial_of(node_id)
        tile, mask = self.tiles[node.operands[0]], self._mask(operand)
        identity = OPS[node.op].identity
        assert identity is not None
        at = f"(wide_row * max_chunks + chunk) * {rows * cols}"
        lanes = f"tl.arange(0, {rows})[:, None] * {cols} + tl.arange(0, {cols})[None, :]"
        write, name = self.writer.write, f"p{node_id}"
        self._comment(node_id)
        value = tile.name
        if node.op == "softmax":
            value = f"{number(node.attribute('scale'))} * {value}"
        shape = f"[{self.writer.chunk}, {rows}, {cols}]"
        write(f"{name} = tl.where({mask}, {value}, {number(identity)})")
        write(f"{name} = tl.broadcast_to({name}, {shape})")
        if node.op == "softmax":
            maxima = self._chunk_buffer("maxima", node_id, rows * cols)
            masses = self._chunk_buffer("masses", node_id, rows * cols)
            write(f"{name}_m = tl.reduce({name}, 0, larger)")
            write(f'{name}_safe = tl.where({name}_m == float("-inf"), 0.0, {name}_m)')
            write(f"{name}_s = tl.sum(tl.exp({name} - {name}_safe[None, :, :]), 0)")
            write(f"tl.store({maxima} + {at} + {lanes}, {name}_m)")
            write(f"tl.store({masses} + {at} + {lanes}, {name}_s)")
            return
        partial = self._chunk_buffer("partial", node_id, rows * cols)
        if node.op in ("max", "min"):
            reduced = f"tl.reduce({name}, 0, {'larger' if node.op == 'max' else 'smaller'})"
        elif node.op == "l2norm":
            reduced = f"tl.sum({name} * {name}, 0)"
        else:
            reduced = f"tl.sum({name}, 0)"
        write(f"tl.store({partial} + {at} + {lanes}, {reduced})")
