#pragma once

#include <string_view>

/// RowExchange::operation of the exchanges of one forward: errors name them, and benches count by them.
namespace fusedmoe {

inline constexpr std::string_view kDispatchHeader = "dispatch header";
inline constexpr std::string_view kDispatchAgreement = "dispatch agreement";
inline constexpr std::string_view kDispatchRows = "dispatch rows";
/// On cards; elsewhere they travel in the rows.
inline constexpr std::string_view kDispatchIds = "dispatch ids", kDispatchWeights = "dispatch weights";
inline constexpr std::string_view kCombineHeader = "combine header";
inline constexpr std::string_view kCombineAgreement = "combine agreement";
inline constexpr std::string_view kCombineRows = "combine rows";
/// Finished rows to the ranks that had the same tokens.
inline constexpr std::string_view kOutputRows = "output rows";

}  // namespace fusedmoe
