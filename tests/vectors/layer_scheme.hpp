#pragma once

#include <fusedmoe/quant.hpp>
#include <fusedmoe/status.hpp>

#include "support/golden.hpp"

namespace fusedmoe::golden {

/// The scheme of a case of `layers`: a word of the manifest, or one of our scheme names.
Result<Scheme> MakeScheme(const GoldenCase& golden_case);

}  // namespace fusedmoe::golden
