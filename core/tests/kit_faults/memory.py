"""Faults in reading and writing memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from attn_core.testing.reference_backend import ReferenceBackend
from attn_core.testing.reference_plain import fetch
from kit_faults._registry import fault

T = torch.Tensor


@fault("page table read as slots", "attend_numbers")
class TableAsSlots(ReferenceBackend):
    def locate(self, metadata: Any, keys: T) -> tuple[T, T]:
        column = keys.clamp(max=metadata.table.shape[1] - 1)
        slot = metadata.table[:, column].long()
        return slot // metadata.page_size, slot[0] % metadata.page_size


@fault("page size 1 assumed", "attend_numbers")
class PageSizeOne(ReferenceBackend):
    def locate(self, metadata: Any, keys: T) -> tuple[T, T]:
        column = keys.clamp(max=metadata.table.shape[1] - 1)
        return metadata.table[:, column].long(), torch.zeros_like(keys)


@fault("pages taken as contiguous", "attend_numbers", page_size=2)
class ContiguousPages(ReferenceBackend):
    def locate(self, metadata: Any, keys: T) -> tuple[T, T]:
        first = metadata.table[:, :1].long()
        return first + keys // metadata.page_size, keys % metadata.page_size

    def read(self, cache: Any, layer: Any, metadata: Any, keys: T) -> Any:
        wide = [torch.cat([t, torch.zeros(200, *t.shape[1:])]) for t in (cache.k, cache.v)]
        return super().read(replace(cache, k=wide[0], v=wide[1]), layer, metadata, keys)


@fault("origin of a trimmed pool ignored", "trimmed")
class OriginIgnored(ReferenceBackend):
    def locate(self, metadata: Any, keys: T) -> tuple[T, T]:
        return super().locate(replace(metadata, origin=None), keys)


@fault("origin of a trimmed pool applied twice", "trimmed", "prefill")
class OriginTwice(ReferenceBackend):
    def locate(self, metadata: Any, keys: T) -> tuple[T, T]:
        return super().locate(replace(metadata, origin=2 * metadata.origin), keys)


@fault("origin of the first trimmed row used for all rows", "trimmed", page_size=1)
class OriginOfOneRow(ReferenceBackend):
    def locate(self, metadata: Any, keys: T) -> tuple[T, T]:
        return super().locate(replace(metadata, origin=metadata.origin[1:2].expand_as(metadata.origin)), keys)


@fault("origin counted in pages of the pool where the kernel's are smaller", "trimmed", "prefill", page_size=1)
class OriginInPoolPages(ReferenceBackend):
    def locate(self, metadata: Any, keys: T) -> tuple[T, T]:
        split = self.context.pool.page_size // metadata.page_size
        return super().locate(replace(metadata, origin=metadata.origin // split), keys)


@fault("row numbers of a server's table ignored", "attend_numbers")
class TableRowsIgnored(ReferenceBackend):
    def new_metadata(self, batch: Any, phase: str, state: Any) -> Any:
        metadata = super().new_metadata(batch, phase, state)
        address = batch.view(self.context.address_index(), "table", metadata.page_size)
        metadata.table = address.table[: batch.padded_rows]
        return metadata


@fault("address of the first pool used for every pool", "attend_numbers")
class FirstPool(ReferenceBackend):
    def new_metadata(self, batch: Any, phase: str, state: Any) -> Any:
        return super().new_metadata(replace(batch, addresses=batch.addresses[:1] * 2, _views={}), phase, state)


@fault("last page read whole", "unused_slots")
class WholePages(ReferenceBackend):
    def read(self, cache: Any, layer: Any, metadata: Any, keys: T) -> Any:
        page, offset = self.locate(metadata, keys)
        return tuple(fetch(pages, None, page, offset, None) for pages in (cache.k, cache.v))


@fault("upper bound of the lengths used as the length", "attend_numbers")
class BoundAsLength(ReferenceBackend):
    def new_metadata(self, batch: Any, phase: str, state: Any) -> Any:
        metadata = super().new_metadata(batch, phase, state)
        metadata.kv_lens = torch.full_like(metadata.kv_lens, metadata.max_kv_len)
        return metadata


@fault("prefix ignored in extend", "attend_numbers", "prefill")
class PrefixIgnored(ReferenceBackend):
    def visible(self, metadata: Any, keys: T, geometry: Any) -> T:
        seen = super().visible(metadata, keys, geometry)
        if metadata.phase != "prefill":
            return seen
        prefix = (metadata.kv_lens.long() - self.query_counts(metadata))[metadata.row]
        return seen & (keys >= prefix[:, None])


@fault("chunks of a prompt attend to their own tokens only", "chunked_prefill", "prefill")
class ChunkAlone(PrefixIgnored):
    pass


@fault("slot 0 written by padding", "padding")
class PaddingToSlotZero(ReferenceBackend):
    def scatter(self, pages: T, values: T, slots: T, size: int) -> None:
        super().scatter(pages, values, slots.clamp(min=0), size)


@fault("padding written to the last slot (index -1)", "padding", "prefill")
class PaddingToLastSlot(ReferenceBackend):
    def scatter(self, pages: T, values: T, slots: T, size: int) -> None:
        super().scatter(pages, values, torch.where(slots < 0, pages.shape[0] * size - 1, slots), size)


@fault("store writes one slot further", "store")
class StoreShifted(ReferenceBackend):
    def scatter(self, pages: T, values: T, slots: T, size: int) -> None:
        super().scatter(pages, values, torch.where(slots < 0, slots, slots + 1), size)


@fault("store multiplies by the scale", "store", dtypes=("bf16", "fp8_e4m3", "bf16"))
class StoreMultiplies(ReferenceBackend):
    def attn_store(self, inputs: Any, layer: Any, cache: Any, address: Any) -> None:
        factor = layer.k_scale.tensor.to(inputs.k.dtype) ** 2
        super().attn_store(inputs._replace(k=inputs.k * factor), layer, cache, address)

    attn_store.attn_impl = ReferenceBackend.attn_store.attn_impl  # type: ignore[attr-defined]


@fault("padded rows of the output hold values", "padding")
class PaddedNotZero(ReferenceBackend):
    def softmax(self, *arguments: Any) -> Any:
        out, lse = super().softmax(*arguments)
        out[arguments[3].num_tokens :] = 1.0
        return out, lse


@fault("adds to the output instead of writing it", "attend_numbers")
class Accumulates(ReferenceBackend):
    def write(self, result: T, out: T | None) -> T:
        return super().write(result, None) if out is None else out.add_(result)


@fault("writes one token past the output", "attend_numbers")
class PastTheOutput(ReferenceBackend):
    def write(self, result: T, out: T | None) -> T:
        if out is not None:
            behind = out.as_strided(out.shape[1:], out.stride()[1:], out.storage_offset() + out.numel())
            behind.zero_()
        return super().write(result, out)


@fault("declares writes_out and returns another tensor", "writes_out")
class OtherTensor(ReferenceBackend):
    def write(self, result: T, out: T | None) -> T:
        return super().write(result, None)


@fault("returns fp32 for a bf16 model", "out_is_optional", dtypes=("bf16", "bf16", "bf16"))
class WideOutput(ReferenceBackend):
    def write(self, result: T, out: T | None) -> T:
        return result if out is None else super().write(result, out)


@fault("one result buffer for all calls", "out_is_optional")
class SharedResult(ReferenceBackend):
    buffer: Any = None

    def write(self, result: T, out: T | None) -> T:
        if out is not None:
            return super().write(result, out)
        if self.buffer is None:
            self.buffer = torch.empty_like(result)
        return super().write(result, self.buffer)


@fault("strides of q ignored", "strides", "prefill")
class QueryStrides(ReferenceBackend):
    def queries(self, q: T, layer: Any) -> T:
        tokens, heads, width = q.shape
        return super().queries(q.as_strided(q.shape, (heads * width, width, 1)), layer)


@fault("strides of the cache ignored", "cache_strides", turn=1)
class CacheStrides(ReferenceBackend):
    def read(self, cache: Any, layer: Any, metadata: Any, keys: T) -> Any:
        def flat(pages: T) -> T:
            _, size, heads, width = pages.shape
            limit = pages.untyped_storage().nbytes() // pages.element_size() // (size * heads * width)
            shape = (min(limit, pages.shape[0]), size, heads, width)
            return pages.as_strided(shape, (size * heads * width, heads * width, width, 1), 0)

        return super().read(replace(cache, k=flat(cache.k), v=flat(cache.v)), layer, metadata, keys)


@fault("offsets of 32 bits", "offsets_of_64_bits", dtypes=("bf16", "fp8_e4m3", "bf16"), head_dims=(32, 32))
class Offsets32(ReferenceBackend):
    def locate(self, metadata: Any, keys: T) -> tuple[T, T]:
        page, offset = super().locate(metadata, keys)
        size = metadata.page_size * self.context.group.geometry.kv_heads * self.context.group.geometry.qk_dim
        wrapped = (page * size + 2**31) % 2**32 - 2**31
        return wrapped // size, offset


@fault("offsets of the batch changed in place", "attend_numbers")
class OffsetsChanged(ReferenceBackend):
    def attn_metadata_in_graph(self, metadata: Any) -> None:
        super().attn_metadata_in_graph(metadata)
        metadata.query_offsets[-1] += 1

    attn_metadata_in_graph.attn_impl = ReferenceBackend.attn_metadata_in_graph.attn_impl  # type: ignore[attr-defined]


@fault("scales q in place", "attend_numbers")
class QueryInPlace(ReferenceBackend):
    def queries(self, q: T, layer: Any) -> T:
        return super().queries(q.mul_(1.0001), layer)


@fault("assumes that every row has a query", "zero_rows", "prefill")
class NoEmptyRows(ReferenceBackend):
    def attn_metadata_in_graph(self, metadata: Any) -> None:
        super().attn_metadata_in_graph(metadata)
        metadata.row.copy_((metadata.index == 0).cumsum(0) - 1)

    attn_metadata_in_graph.attn_impl = ReferenceBackend.attn_metadata_in_graph.attn_impl  # type: ignore[attr-defined]


@fault("reads CSR lists as if all rows were equally long", "address_forms")
class CsrStride(ReferenceBackend):
    def new_metadata(self, batch: Any, phase: str, state: Any) -> Any:
        metadata = super().new_metadata(batch, phase, state)
        address = batch.kv(self.context.address_index())
        if address.indices is not None:
            rows, width = metadata.table.shape
            place = torch.arange(rows * width) % len(address.indices)
            metadata.table = address.indices[place].view(rows, width)
        return metadata


@fault("sinks ignored where they are not declared", "refuses_bad_inputs")
class SinksIgnored(ReferenceBackend):
    def softmax(self, logits: Any, values: Any, layer: Any, metadata: Any, out: Any) -> Any:
        return super().softmax(logits, values, replace(layer, sinks=None), metadata, out)


@fault("gather forgets where a part starts", "gather")
class GatherFromZero(ReferenceBackend):
    def attn_gather(self, cache: Any, address: Any, part: Any, layer: Any) -> Any:
        moved = None if part is None else replace(part, start=torch.zeros_like(part.start))
        return super().attn_gather(cache, address, moved, layer)

    attn_gather.attn_impl = ReferenceBackend.attn_gather.attn_impl  # type: ignore[attr-defined]


@fault("gather leaves the scale out", "gather", dtypes=("bf16", "fp8_e4m3", "bf16"))
class GatherUnscaled(ReferenceBackend):
    def attn_gather(self, cache: Any, address: Any, part: Any, layer: Any) -> Any:
        return super().attn_gather(cache, address, part, replace(layer, v_scale=None))

    attn_gather.attn_impl = ReferenceBackend.attn_gather.attn_impl  # type: ignore[attr-defined]
