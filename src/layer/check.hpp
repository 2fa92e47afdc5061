#pragma once

#include <cstdint>
#include <string_view>

#include <fusedmoe/layer.hpp>

namespace fusedmoe {

/// The experts of an engine, which no reader has seen: what does not fit its format is refused before a
/// backend decodes it, as tensors of "<kind> 3".
ExpertSource Validated(const ExpertSource& experts, std::string_view kind = "expert");

/// The same experts with a down bias of zeros: the outputs of tensor-parallel ranks are added up, and the
/// first of them alone adds the bias.
ExpertSource WithoutDownBias(const ExpertSource& experts);

/// The shared expert of an engine, or that there is none (null): what the config says of it.
Status CheckShared(const SharedExpertWeights* shared, const MoeConfig& config);

/// The same experts, each with all that some of them have beside their codes (AddFeatures). The failure of
/// the lowest expert that cannot be loaded.
Result<ExpertSource> MadeAlike(const ExpertSource& experts, const Executor& executor);

/// The router of an engine, which no reader has seen either: logits are written for each of its rows.
Status CheckRouter(const RouterWeights& router, const MoeConfig& config, int64_t num_logits);

/// kUsage where a card would write rows of `hidden` columns in pieces of 8 or 16 bytes to an address that is
/// no multiple of them: its kernels fail there.
Status CheckOnCard(MutableTensorView output, int64_t hidden);

/// Ids of the caller, I32 or I64 [M, k] on the host: kUsage where one is neither an expert nor -1, which
/// skips a slot. Written densely to `ids`, unless that is null.
Status TakeIds(TensorView source, int64_t num_experts, int32_t* ids);

}  // namespace fusedmoe
