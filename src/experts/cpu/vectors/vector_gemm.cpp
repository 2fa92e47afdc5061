#include "experts/cpu/vectors/vector_gemm.hpp"

namespace fusedmoe::cpu {

TileRange VectorGemm::BatchFrom(int64_t begin) const {
  const PieceTiles& all = run_.tiles;
  const Tile& first = all.list[begin];
  const auto rows_to = [&](const Tile& last) {
    return last.first_row + TileRows(layer_.plan, last) - first.first_row;
  };
  int64_t end = begin + 1;
  while (end < all.count && all.list[end].expert == first.expert && end - begin < kMostViews &&
         rows_to(all.list[end]) * shape_.tile_row_bytes <= layer_.plan.tile_batch_bytes) {
    ++end;
  }
  return {begin, end};
}

void VectorGemm::View(Operand operand, const Tile& tile, const WeightRange& range, TileView& view) const {
  view.tall_tile.rows = run_.tiles.slot_rows[operand] + tile.first_slot;
  void* memory = ReadsTokensApart(layer_.plan, tile)
                     ? view.tall_tile.rows[0]
                     : run_.tiles.packed[operand] + tile.first_row * shape_.tile_row_bytes;
  PlaceTile(&view, memory, shape_.kernel, shape_.tile, shape_.padded_cols, kHeights[tile.height_index]);
  view.tokens = tile.count;
  view.group_scales = GroupScalesOf(shape_.panel);
  view.tall_tile.slab_tiles = shape_.slab_tiles;
  view.tall_tile.wide_slabs = shape_.wide_slabs;
  view.tall_tile.next_into_l2 = layer_.plan.next_into_l2;
  view.short_tile.prefetch = shape_.prefetch[std::min(tile.height_index, 1)];
  view.short_tile.prefetch_far = shape_.prefetch_far;
  view.short_tile.range_end = range.end;
  view.short_tile.range_jump = range.next == nullptr ? 0 : range.next - range.end;
}

/// Each tall tile prefetches an equal share of the stripes that come behind those that it meets.
TileViews::TileViews(const VectorGemm& gemm, const TileRange& batch, const WeightRange& range)
    : batch_(batch), parts_(gemm.separate_inputs() ? gemm.shape().parts : 1), range_(range) {
  static_assert(kUpInput == kGateInput + 1);
  const int first_operand = gemm.shape().gemm == kDown ? kMid : kGateInput;
  const int64_t ahead_bytes = gemm.StripesAtOnce(batch) * gemm.position_bytes();
  const Tile* tiles = gemm.tiles() + batch.begin;
  const int64_t count = batch.end - batch.begin;
  const int64_t tall =
      std::count_if(tiles, tiles + count, [&](const Tile& tile) { return gemm.IsTall(tile); });
  const auto share = [&](int64_t done) { return tall == 0 ? 0 : ahead_bytes * done / tall / 64 * 64; };
  for (int64_t i = 0, done = 0; i < count; ++i) {
    for (int part = 0; part < parts_; ++part) {
      TileView& view = of_[part][i];
      gemm.View(static_cast<Operand>(first_operand + part), tiles[i], range, view);
      view.short_tile.next_stripe_tile = parts_ == 2 ? &of_[1 - part][i] : nullptr;
    }
    share_[i] = share(done);
    done += gemm.IsTall(tiles[i]) ? 1 : 0;
    share_[i + 1] = share(done);
  }
}

}  // namespace fusedmoe::cpu
