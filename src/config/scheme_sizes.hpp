#pragma once

#include <string_view>

#include <fusedmoe/config.hpp>
#include <fusedmoe/quant.hpp>
#include <fusedmoe/status.hpp>

namespace fusedmoe {

/// kBadInput where groups of the scheme do not divide what its experts multiply by: partial groups are padded
/// by nobody.
Status CheckSchemeSizes(const MoeConfig& config, const Scheme& scheme);

/// ParseScheme for such experts, with that check.
Result<Scheme> ParseSchemeFor(const MoeConfig& config, std::string_view name);

}  // namespace fusedmoe
