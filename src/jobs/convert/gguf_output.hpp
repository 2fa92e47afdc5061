#pragma once

#include "jobs/common/output_checkpoint.hpp"
#include "jobs/convert/plan.hpp"

/// The MoE layers of a checkpoint as a GGUF file: experts in one tensor a projection, routers, biases, shared
/// experts, and the metadata that say how they act. Attention, embeddings and vocabulary are left out.
namespace fusedmoe::jobs {

/// Refuses (kUnsupported, with the tensor) what GGUF has no place for.
Status WriteGgufLayers(const ExpertsRewriter& rewriter, const ConvertPlan& plan, const WriteOptions& options,
                       OutputCheckpoint& output);

/// Tensors of the source that such a file lacks.
int64_t LeftOutOfGguf(const ExpertsRewriter& rewriter);

}  // namespace fusedmoe::jobs
