#pragma once

namespace fusedmoe {

/// The revision of the bytes that panels have (weights/panel.hpp): raised whenever a build packs a matrix to
/// other bytes under the same text of a format, so that files of packed weights are made again.
inline constexpr int kPanelRevision = 1;

}  // namespace fusedmoe
