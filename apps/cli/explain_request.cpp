#include "explain_request.hpp"

#include <charconv>
#include <system_error>

#include <fmt/format.h>

#include <fusedmoe/parallel.hpp>
#include <fusedmoe/problems.hpp>

#include "describe.hpp"

namespace fusedmoe::cli {
namespace {

Status TakeProblem(const ExplainFlags& flags, ExplainRequest& request) {
  if (const std::string idle = IdleWithoutCheckpoint(flags.checkpoint); !idle.empty()) {
    return Status::Usage(
        fmt::format("{} has no effect on a described layer, which is read from no files", idle));
  }
  FMOE_ASSIGN_OR_RETURN(const Problem problem, ReadProblem(flags.problem));
  FMOE_ASSIGN_OR_RETURN(request.scheme,
                        ParseSchemeFor(problem.config, flags.scheme.empty() ? problem.scheme : flags.scheme));
  request.problem = problem.name;
  request.config = problem.config;
  return Status::Ok();
}

Result<AskedLayer> TakeLayer(const ExplainFlags& flags, ExplainRequest& request) {
  AskedLayer asked;
  if (flags.checkpoint.directory.empty() == flags.problem.empty()) {
    return Status::Usage(flags.problem.empty()
                             ? "a checkpoint or --problem is required"
                             : "a checkpoint and --problem are given; one of them is the layer")
        .WithHint("see fusedmoe explain --help");
  }
  if (flags.checkpoint.directory.empty()) {
    FMOE_RETURN_IF_ERROR(TakeProblem(flags, request));
    return asked;
  }
  if (!flags.scheme.empty()) {
    return Status::Usage("--scheme goes with --problem; a checkpoint has its own scheme");
  }
  FMOE_ASSIGN_OR_RETURN(asked.checkpoint, OpenCheckpoint(flags.checkpoint));
  FMOE_ASSIGN_OR_RETURN(asked.layer, ResolveLayer(flags.layer, *asked.checkpoint));
  FMOE_ASSIGN_OR_RETURN(const LayerDescription description, asked.checkpoint->Describe(asked.layer));
  request.problem = fmt::format("{} layer {}", asked.checkpoint->directory(), asked.layer);
  request.config = description.config;
  request.scheme = description.scheme;
  FMOE_ASSIGN_OR_RETURN(const std::optional<LatentWeights> latent, asked.checkpoint->Latent(asked.layer));
  if (latent) {
    for (const Tensor* part :
         {&latent->to_latent, &latent->to_latent_bias, &latent->from_latent, &latent->from_latent_bias}) {
      request.latent_bytes += part->empty() ? 0 : part->view().total_bytes();
    }
  }
  return asked;
}

// The deployment, and what the experts of its rank decide: their blocks of scales may begin elsewhere than
// those of all. Upstream's kernels are asked about the whole matrices.
Status SetParallel(const AskedLayer& asked, ParallelSizes sizes, bool sequence_parallel, int64_t rank,
                   ExplainRequest& request) {
  if (sequence_parallel) {
    sizes.sp = SequenceParallelSize(sizes);
  }
  FMOE_RETURN_IF_ERROR(MakeParallelConfig(sizes).status());
  FMOE_ASSIGN_OR_RETURN(const ParallelRanks place, RanksOf(sizes, rank));
  FMOE_ASSIGN_OR_RETURN(request.config.parallel, MakeParallelConfig(sizes, place));
  if (asked.checkpoint == nullptr) {
    return Status::Ok();
  }
  FMOE_ASSIGN_OR_RETURN(const Platform platform, FindPlatform(request.platform));
  FMOE_ASSIGN_OR_RETURN(
      const ExpertSource experts,
      asked.checkpoint->Experts(asked.layer,
                                platform.runs_this_build ? request.config.parallel : ParallelConfig()));
  return TakeWeights(experts, request);
}

// What chooses among the kernels of this build says nothing of upstream's backends. `--diff` may ask about
// both.
Status CheckPlatform(const ExplainFlags& flags) {
  FMOE_ASSIGN_OR_RETURN(const Platform platform, FindPlatform(flags.platform));
  const char* idle = !flags.plan.isa.empty()    ? "--isa"
                     : !flags.plan.mode.empty() ? "--mode"
                     : !flags.plan.tune.empty() ? "--tune"
                     : flags.threads_given      ? "--threads"
                                                : nullptr;
  if (platform.runs_this_build || idle == nullptr || !flags.diff.empty()) {
    return Status::Ok();
  }
  return Status::Usage(
      fmt::format("{} has no effect on the platform {}: it is of the CPU kernels of this build, which host "
                  "and cpu-... have",
                  idle, platform.name));
}

}  // namespace

Result<ExplainRequest> RequestOf(const ExplainFlags& flags, AskedLayer& asked) {
  ExplainRequest request;
  FMOE_ASSIGN_OR_RETURN(const LayerOptions plan, Resolve(flags.plan));
  FMOE_RETURN_IF_ERROR(CheckPlatform(flags));
  FMOE_ASSIGN_OR_RETURN(asked, TakeLayer(flags, request));
  request.platform = flags.platform;
  FMOE_RETURN_IF_ERROR(SetParallel(asked, flags.parallel, flags.sequence_parallel, flags.rank, request));
  request.device = plan.device;
  request.tokens = flags.tokens;
  request.num_threads = flags.threads == 0 ? HostMachine().num_cores : flags.threads;
  request.determinism = plan.determinism;
  request.activation = plan.activation;
  request.isa = plan.isa;
  request.mode = plan.mode;
  request.cpu_costs = plan.cpu_costs;
  if (!flags.plan.activation_format.empty()) {
    request.activation_format = plan.activation_format;
  }
  request.selection.backend = plan.backend;
  request.selection.env = flags.env;
  request.selection.lora = flags.lora;
  const std::optional<DType> logits = ParseDType(flags.logits_dtype);
  if (!logits || !(*logits == DType::kF32 || *logits == DType::kBF16 || *logits == DType::kF16)) {
    return UnknownName("dtype of router logits", flags.logits_dtype, "F32, BF16, F16");
  }
  request.selection.router_logits_dtype = *logits;
  if (flags.allow_vllm_cutlass != "" && flags.allow_vllm_cutlass != "on" &&
      flags.allow_vllm_cutlass != "off") {
    return UnknownName("value of --allow-vllm-cutlass", flags.allow_vllm_cutlass, "on, off");
  }
  if (!flags.allow_vllm_cutlass.empty()) {
    request.selection.allow_vllm_cutlass = flags.allow_vllm_cutlass == "on";
  }
  return request;
}

Result<ExplainRequest> SideOf(const ExplainFlags& flags, const AskedLayer& asked,
                              const ExplainRequest& question, const std::string& text) {
  ExplainRequest side = question;
  ParallelSizes sizes = flags.parallel;
  bool sequence_parallel = flags.sequence_parallel;
  FMOE_ASSIGN_OR_RETURN(const std::vector<std::string> words, SplitList("--diff", text));
  for (const std::string& word : words) {
    const size_t equals = word.find('=');
    const std::string name = word.substr(0, equals);
    const std::string value = equals == std::string::npos ? "" : word.substr(equals + 1);
    int64_t* size = name == "tp"    ? &sizes.tp
                    : name == "dp"  ? &sizes.dp
                    : name == "pcp" ? &sizes.pcp
                                    : nullptr;
    if (size != nullptr) {
      const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), *size);
      if (error != std::errc() || end != value.data() + value.size() || *size < 1 || *size > 1 << 20) {
        return Status::Usage(fmt::format("--diff: '{}' needs a size, as in {}=8", word, name));
      }
    } else if (name == "all2all" && !value.empty()) {
      sizes.all2all = value;
    } else if (word == "ep" || word == "no-ep") {
      sizes.enable_expert_parallel = word == "ep";
    } else if (word == "eplb") {
      sizes.enable_eplb = true;
    } else if (word == "sp") {
      sequence_parallel = true;
    } else if (FindPlatform(word).ok()) {
      side.platform = word;
    } else {
      return UnknownName("--diff", word,
                         "tp=N, dp=N, pcp=N, ep, no-ep, sp, eplb, all2all=NAME, host, " +
                             Join(DescribedPlatforms(), &Platform::name));
    }
  }
  FMOE_RETURN_IF_ERROR(SetParallel(asked, sizes, sequence_parallel, 0, side));
  return side;
}

}  // namespace fusedmoe::cli
