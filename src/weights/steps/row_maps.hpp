#pragma once

#include <cstdint>
#include <vector>

#include <fusedmoe/status.hpp>
#include <fusedmoe/tensor.hpp>

/// Orders of rows that kernels ask for, as gather lists: new row i holds old row map[i]. Rows count from 0.
namespace fusedmoe {

/// Gate rows first to up rows first: the halves change places. `rows` must be even.
Result<std::vector<int32_t>> SwappedHalves(int64_t rows);

/// Rows of the first half at even places, those of the second at odd ones. `rows` must be even.
Result<std::vector<int32_t>> InterleavedHalves(int64_t rows);

/// Groups of `group` rows of the two halves in turn. Each half must hold whole groups.
Result<std::vector<int32_t>> InterleavedGroups(int64_t rows, int64_t group);

/// Rows that one block of the shuffle holds: 32 when the tile of the epilogue is a multiple of 128, else 16.
int64_t ShuffleBlock(int64_t epilogue_tile);

/// The order in which the transposed product of TensorRT-LLM kernels reads its rows: within each block, the
/// block's quarters (of 32) or halves (of 16) dealt out one by one. `rows` must be a multiple of the block.
Result<std::vector<int32_t>> ShuffledRows(int64_t rows, int64_t epilogue_tile);

/// One list for two reorderings, `first` and then `second`.
std::vector<int32_t> Compose(const std::vector<int32_t>& first, const std::vector<int32_t>& second);

/// scatter[old] = new for a gather list that is a permutation.
std::vector<int32_t> InverseOf(const std::vector<int32_t>& gather);

/// The rows of a dense matrix [rows, ...] in another order.
Result<Tensor> GatherRows(TensorView matrix, const std::vector<int32_t>& gather);

}  // namespace fusedmoe
