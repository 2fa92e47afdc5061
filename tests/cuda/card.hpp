#pragma once

#include <initializer_list>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <fusedmoe/quant.hpp>

#include "experts/cuda/prefill/prefill.hpp"
#include "platform/cuda/card.hpp"
#include "weights/fragment_pack.hpp"

/// Ends a test that needs a card where none can be used, and says why.
#define FMOE_SKIP_WITHOUT_CARD()                                                                      \
  if (const fusedmoe::Status card = fusedmoe::cuda::CheckCard(fusedmoe::HostMachine()); !card.ok()) { \
    GTEST_SKIP() << card.message();                                                                   \
  }

/// The same of a test that needs the kernels of one scheme.
#define FMOE_SKIP_WITHOUT_KERNELS(scheme)                                                   \
  FMOE_SKIP_WITHOUT_CARD()                                                                  \
  if (!fusedmoe::KernelsAreBuilt(scheme)) {                                                 \
    GTEST_SKIP() << "the kernels for " << (scheme) << " were left out (FMOE_CUDA_FORMATS)"; \
  }

namespace fusedmoe {

inline bool KernelsAreBuilt(const std::string& scheme) {
  const Result<Scheme> parsed = ParseScheme(scheme);
  EXPECT_TRUE(parsed.ok()) << parsed.status().message();
  const Result<FragmentSpec> spec = ChooseFragmentSpec(parsed->weight, false);
  EXPECT_TRUE(spec.ok()) << spec.status().message();
  return cuda::HasKernels(spec->format);
}

/// Those of several schemes that this build has kernels for.
inline std::vector<std::string> BuiltSchemes(std::initializer_list<const char*> schemes) {
  std::vector<std::string> built;
  for (const char* scheme : schemes) {
    if (KernelsAreBuilt(scheme)) {
      built.emplace_back(scheme);
    }
  }
  return built;
}

}  // namespace fusedmoe
