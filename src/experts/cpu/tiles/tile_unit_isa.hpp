#pragma once

/// The matrix unit that the flags of this file allow: tile registers, or portable code in their place.
#if defined(__AMX_TILE__)
#include "experts/cpu/tiles/tile_amx_isa.hpp"
#else
#include "experts/cpu/tiles/tile_emulated_isa.hpp"
#endif
