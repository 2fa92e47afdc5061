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

void VectorGemm::View(Operand operand, const Tile& tile, const Stretch& stretch, TileView& view) const {
  view.rows = run_.tiles.slot_rows[operand] + tile.first_slot;
  void* memory = ReadsTokensApart(layer_.plan, tile)
                     ? view.rows[0]
                     : run_.tiles.packed[operand] + tile.first_row * shape_.tile_row_bytes;
  PlaceTile(&view, memory, shape_.kernel, shape_.tile, shape_.padded_cols, kHeights[tile.height_index]);
  view.tokens = tile.count;
  view.group_scales = GroupScalesOf(shape_.panel);
  view.slab_tiles = shape_.slab_tiles;
  view.wide_slabs = shape_.wide_slabs;
  view.prefetch = shape_.prefetch[std::min(tile.height_index, 1)];
  view.prefetch_far = shape_.prefetch_far;
  view.next_into_l2 = layer_.plan.next_into_l2;
  view.stretch_end = stretch.end;
  view.stretch_jump = stretch.next == nullptr ? 0 : stretch.next - stretch.end;
}

/// Tall tiles ask in equal shares for the stripes that come behind those that they meet.
TileViews::TileViews(const VectorGemm& gemm, const TileRange& batch, const Stretch& stretch)
    : batch_(batch), parts_(gemm.separate_inputs() ? gemm.shape().parts : 1), stretch_(stretch) {
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
      gemm.View(static_cast<Operand>(first_operand + part), tiles[i], stretch, view);
      view.turn = parts_ == 2 ? &of_[1 - part][i] : nullptr;
    }
    share_[i] = share(done);
    done += gemm.IsTall(tiles[i]) ? 1 : 0;
    share_[i + 1] = share(done);
  }
}

}  // namespace fusedmoe::cpu
