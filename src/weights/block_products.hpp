#pragma once

#include <cstdint>

#include <fusedmoe/weights.hpp>

/// Weights in blocks along the outputs. Their scales differ from column to column and fit no group of k of a
/// layout: layouts hold the products of codes and block scales instead, as BF16.
namespace fusedmoe {

/// Whether layouts hold products of such weights: blocks of one column, whose products BF16 has without loss
/// (at most 4 + 4 significant bits).
bool BecomesProducts(const WeightFormat& format);

/// The products of a row, BF16 [cols]. Below 2^-126 bits are cut off.
void MultiplyRow(const CanonicalMatrix& matrix, int64_t row, uint16_t* out);

}  // namespace fusedmoe
