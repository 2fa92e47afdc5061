#pragma once

#include <array>
#include <cstdint>

/// The grids of ggml's IQ types: points of eight or four small numbers, of which a code is the number. A grid
/// holds some of all points that a few coordinates make, and counts them as numbers are counted: the first
/// coordinate is the lowest digit. So a grid is known by which points it holds (ggml: `iq2xxs_grid` to
/// `iq1s_grid`, which list them).
namespace fusedmoe::checkpoint {

template <int kPoints, int kWidth>
using Grid = std::array<std::array<uint8_t, kWidth>, kPoints>;

// Magnitudes 8, 25, 43.
extern const Grid<256, 8> kIq2XxsGrid;
extern const Grid<512, 8> kIq2XsGrid;
extern const Grid<1024, 8> kIq2SGrid;
// Magnitudes 4, 12, 20, 28, 36, 44, 52, 62.
extern const Grid<256, 4> kIq3XxsGrid;
// 0 to 7, of magnitudes 1, 3, ..., 15.
extern const Grid<512, 4> kIq3SGrid;
// 0, 1, 2, of values -1, 0, 1.
extern const Grid<2048, 8> kIq1Grid;

}  // namespace fusedmoe::checkpoint
