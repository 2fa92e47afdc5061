#include "weights/steps/row_maps.hpp"

#include <cstring>

#include <fmt/format.h>

namespace fusedmoe {
namespace {

Status NotWhole(const char* step, int64_t rows, int64_t multiple) {
  return Status::Unsupported(
      fmt::format("{} needs a multiple of {} rows, the matrix has {}", step, multiple, rows));
}

}  // namespace

Result<std::vector<int32_t>> SwappedHalves(int64_t rows) {
  if (rows % 2 != 0) {
    return NotWhole("swapping gate and up", rows, 2);
  }
  std::vector<int32_t> gather(static_cast<size_t>(rows));
  for (int64_t row = 0; row < rows; ++row) {
    gather[static_cast<size_t>(row)] = static_cast<int32_t>((row + rows / 2) % rows);
  }
  return gather;
}

Result<std::vector<int32_t>> InterleavedHalves(int64_t rows) {
  return InterleavedGroups(rows, 1);
}

Result<std::vector<int32_t>> InterleavedGroups(int64_t rows, int64_t group) {
  if (group < 1 || rows % (2 * group) != 0) {
    return NotWhole("interleaving gate and up", rows, 2 * group);
  }
  std::vector<int32_t> gather(static_cast<size_t>(rows));
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t turn = row / group;
    gather[static_cast<size_t>(row)] =
        static_cast<int32_t>(turn % 2 * (rows / 2) + turn / 2 * group + row % group);
  }
  return gather;
}

int64_t ShuffleBlock(int64_t epilogue_tile) {
  return epilogue_tile % 128 == 0 ? 32 : 16;
}

Result<std::vector<int32_t>> ShuffledRows(int64_t rows, int64_t epilogue_tile) {
  const int64_t block = ShuffleBlock(epilogue_tile);
  if (rows % block != 0) {
    return NotWhole("the row shuffle", rows, block);
  }
  // Neighbours move eight places apart, so that a thread of the product's fragment owns consecutive outputs.
  const int64_t parts = block / 8;
  std::vector<int32_t> gather(static_cast<size_t>(rows));
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t inside = row % block;
    const int64_t source = row - inside + inside % 8 * parts + inside / 8;
    gather[static_cast<size_t>(row)] = static_cast<int32_t>(source);
  }
  return gather;
}

std::vector<int32_t> Compose(const std::vector<int32_t>& first, const std::vector<int32_t>& second) {
  std::vector<int32_t> both(second.size());
  for (size_t row = 0; row < second.size(); ++row) {
    both[row] = first[static_cast<size_t>(second[row])];
  }
  return both;
}

std::vector<int32_t> InverseOf(const std::vector<int32_t>& gather) {
  std::vector<int32_t> scatter(gather.size());
  for (size_t row = 0; row < gather.size(); ++row) {
    scatter[static_cast<size_t>(gather[row])] = static_cast<int32_t>(row);
  }
  return scatter;
}

Result<Tensor> GatherRows(TensorView matrix, const std::vector<int32_t>& gather) {
  FMOE_ASSIGN_OR_RETURN(Tensor result, Tensor::Allocate(matrix.dtype(), matrix.shape()));
  const int64_t row_bytes = matrix.total_bytes() / matrix.dim(0);
  std::byte* out = result.mutable_view().data();
  for (const int32_t row : gather) {
    std::memcpy(out, matrix.data() + row * row_bytes, static_cast<size_t>(row_bytes));
    out += row_bytes;
  }
  return result;
}

}  // namespace fusedmoe
