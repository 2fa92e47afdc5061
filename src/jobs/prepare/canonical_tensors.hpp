#pragma once

#include <string>
#include <vector>

#include <fusedmoe/safetensors.hpp>
#include <fusedmoe/weights.hpp>

/// Canonical matrices as named tensors, for experts that a prepared file only carries along.
namespace fusedmoe::prepared {

/// "PREFIX.codes", "PREFIX.block_scale" ..., scalars as F32 [1], offsets of a slice as I64 [2].
void AppendMatrix(const std::string& prefix, const CanonicalMatrix& matrix, std::vector<NamedTensor>& out);

/// The inverse, checked by ValidateCanonical. 4-bit codes are stored as bytes of `cols` elements.
Result<CanonicalMatrix> TakeMatrix(const SafetensorsFile& file, const std::string& prefix, int64_t rows,
                                   int64_t cols, const WeightFormat& format);

/// 4- and 6-bit types have no name that every reader knows: their bytes travel as U8.
NamedTensor AsStored(const std::string& name, const Tensor& tensor);
/// Stored bytes as what they are; kBadInput unless the size fits.
Result<Tensor> AsType(const std::string& name, const Tensor& stored, DType dtype, const Shape& shape);

}  // namespace fusedmoe::prepared
