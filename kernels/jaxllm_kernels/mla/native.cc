// Attention to latents: one row per token, which is the key of all heads, and whose beginning is
// their value. `ragged_paged_attention/native.h` has the attention.

#include "native/ffi.h"
#include "ragged_paged_attention/native.h"

namespace {

template <ffi::DataType kType, typename Kind>
ffi::Error AttendLatents(ffi::ThreadPool pool, ffi::Buffer<kType, 3> q, ffi::Buffer<kType, 2> rows,
                         ffi::Buffer<kType, 3> cache, ffi::Buffer<ffi::S32, 1> query_starts,
                         ffi::Buffer<ffi::S32, 1> context_lens,
                         ffi::Buffer<ffi::S32, 2> block_tables, ffi::ResultBuffer<kType, 3> out,
                         ffi::ResultBuffer<kType, 3> new_cache, float scale, int64_t block_size,
                         int64_t fewest_fresh) {
  using Element = typename Kind::Element;
  if (cache.untyped_data() != new_cache->untyped_data())
    return ffi::Error::InvalidArgument("the cache must be updated in place");
  const auto shape = cache.dimensions();  // [blocks, tokens, width]
  Layer<Kind> layer{};
  layer.q = reinterpret_cast<const Element*>(q.untyped_data());
  layer.v = reinterpret_cast<const Element*>(rows.untyped_data());
  layer.cache = reinterpret_cast<Element*>(new_cache->untyped_data());
  layer.out = reinterpret_cast<Element*>(out->untyped_data());
  layer.query_starts = query_starts.typed_data();
  layer.context_lens = context_lens.typed_data();
  layer.block_tables = block_tables.typed_data();
  layer.num_tokens = q.dimensions()[0];
  layer.num_rows = context_lens.dimensions()[0];
  layer.max_blocks = block_tables.dimensions()[1];
  layer.num_blocks = shape[0];
  layer.num_heads = q.dimensions()[1];
  layer.num_kv_heads = 1;
  layer.head_size = shape[2];
  layer.value_size = out->dimensions()[2];
  layer.block_size = block_size;
  layer.page_tokens = shape[1];
  layer.has_latents = true;
  layer.heads_at_once = std::min<int64_t>(layer.num_heads, kTileLines);
  layer.scale = scale;
  layer.fewest_fresh = fewest_fresh;
  if (q.dimensions()[2] != layer.head_size || rows.dimensions()[1] != layer.head_size ||
      layer.head_size % kLanes != 0 || layer.value_size % kLanes != 0)
    return ffi::Error::InvalidArgument("queries and rows must have the width of the cache");
  if (!IsWithinBounds(layer))
    return ffi::Error::InvalidArgument("the batch refers to tokens or blocks that do not exist");

  // Few tiles are cut by heads, so that all threads have work. Each part makes the keys anew, and
  // no sum is over heads.
  const auto tiles = CutTiles(layer);
  while (int64_t(tiles.size()) * layer.parts() < pool.num_threads() &&
         layer.heads_at_once > kBlockLines)
    layer.heads_at_once = (layer.heads_at_once + 1) / 2;
  Compute(layer, tiles, pool);
  return ffi::Error::Success();
}

}  // namespace

#ifdef JAXLLM_FLOAT32
JAXLLM_FUNCTION(jaxllm_latents_f32, (AttendLatents<ffi::F32, Float32>), "scale", "block_size",
                "fewest_fresh")
#endif
#ifdef JAXLLM_BFLOAT16
JAXLLM_FUNCTION(jaxllm_latents_bf16, (AttendLatents<ffi::BF16, BFloat16>), "scale", "block_size",
                "fewest_fresh")
#endif
