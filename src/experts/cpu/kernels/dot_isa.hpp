#pragma once

#include "experts/cpu/kernels/dot_float_isa.hpp"
#include "experts/cpu/kernels/dot_integer_isa.hpp"
#include "experts/cpu/kernels/dot_tall_isa.hpp"

/// The micro-kernels: 16 rows of weights times a tile of 1 to 8 tokens, K innermost.
///
///              K ->                          one unit = 64 k
///     stripe   [codes | scales] [codes | scales] ...      one stream, prefetched
///     tile     [64 k x tokens ] [64 k x tokens ] ...      broadcast, from L1 or L2
///     result   [token][16 rows]                           registers until the stripe ends
///
/// Every format decodes in registers and every token runs through the same sequence of operations whatever
/// the height of its tile, so that neighbours never change its bits.
