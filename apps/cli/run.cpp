#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <fmt/format.h>

#include <fusedmoe/executor.hpp>
#include <fusedmoe/jobs/verify.hpp>
#include <fusedmoe/layer.hpp>
#include <fusedmoe/probe.hpp>
#include <fusedmoe/safetensors.hpp>

#include "command.hpp"
#include "describe.hpp"
#include "input_file.hpp"
#include "options.hpp"
#include "ranks.hpp"
#include "subject.hpp"

namespace fusedmoe::cli {
namespace {

struct RunFlags {
  CheckpointFlags checkpoint;
  PlanFlags plan;
  RankFlags ranks;
  std::optional<int64_t> layer;
  std::string input;
  std::string output;
  int threads = 0;
  int64_t repeat = 1;
  bool check = false;
  bool shared_experts = true;
};

double Seconds(std::chrono::steady_clock::time_point since) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - since).count();
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : 0.5 * (values[middle - 1] + values[middle]);
}

/// The part of the input that one rank runs.
MoeLayer::Inputs RowsOf(MoeLayer::Inputs inputs, const TokenSlice& slice) {
  for (TensorView* view : {&inputs.hidden, &inputs.router_logits, &inputs.topk_ids, &inputs.topk_weights}) {
    *view = view->empty() ? *view : view->Rows(slice.begin, slice.count);
  }
  if (TensorView& ids = inputs.token_ids; !ids.empty()) {
    ids = TensorView(ids.data() + slice.begin * PackedBytes(ids.dtype(), 1), ids.dtype(), {slice.count});
  }
  return inputs;
}

/// What load balancing did in the course of a run.
struct EplbTotals {
  EplbStep last;  // of those that ended an interval
  int64_t plans = 0, switches = 0, experts_received = 0, bytes_received = 0;
  double seconds = 0;
};

/// What a run computed and how long it took.
struct Forward {
  Tensor output, topk_ids, topk_weights;
  std::vector<double> seconds;
  EplbTotals eplb;
};

Status EndStep(MoeLayer& layer, EplbTotals& totals) {
  const auto start = std::chrono::steady_clock::now();
  FMOE_ASSIGN_OR_RETURN(const EplbStep step, layer.EndStep());
  if (step.planned) {
    totals.last = step;
    ++totals.plans;
    totals.switches += step.switched ? 1 : 0;
    totals.experts_received += step.experts_received;
    totals.bytes_received += step.bytes_received;
    totals.seconds += Seconds(start);
  }
  return Status::Ok();
}

Json EplbJson(const EplbTotals& totals) {
  return {{"epoch", totals.last.epoch},
          {"plans", totals.plans},
          {"switches", totals.switches},
          {"kept", totals.last.kept},
          {"slots_changed", totals.last.slots_changed},
          {"balancedness", totals.last.balancedness},
          {"planned_balancedness", totals.last.planned_balancedness},
          {"experts_received", totals.experts_received},
          {"bytes_received", totals.bytes_received},
          {"seconds", totals.seconds}};
}

Result<Forward> RunLayer(MoeLayer& layer, const MoeLayer::Inputs& inputs, const RunFlags& flags,
                         const Executor& executor) {
  Forward forward;
  const int64_t num_tokens = inputs.hidden.dim(0);
  const int64_t top_k = layer.config().top_k();
  FMOE_ASSIGN_OR_RETURN(forward.output,
                        Tensor::Allocate(inputs.hidden.dtype(), {num_tokens, layer.config().hidden}));
  FMOE_ASSIGN_OR_RETURN(forward.topk_ids, Tensor::Allocate(DType::kI32, {num_tokens, top_k}));
  FMOE_ASSIGN_OR_RETURN(forward.topk_weights, Tensor::Allocate(DType::kF32, {num_tokens, top_k}));
  FMOE_ASSIGN_OR_RETURN(const Workspace workspace, layer.CreateWorkspace());
  const MoeLayer::Outputs outputs{forward.output.mutable_view(), forward.topk_ids.mutable_view(),
                                  forward.topk_weights.mutable_view()};
  for (int64_t round = 0; round < flags.repeat; ++round) {
    const auto start = std::chrono::steady_clock::now();
    const Status status = layer.ForwardFromHost(inputs, outputs, workspace, executor);
    if (status.code() == StatusCode::kUsage) {  // what the layer was called with stands in the file
      return Status::BadInput(status.message()).WithFile(flags.input).WithTensor(status.tensor());
    }
    FMOE_RETURN_IF_ERROR(status);
    forward.seconds.push_back(Seconds(start));
    if (flags.ranks.sizes.enable_eplb && layer.config().parallel.use_ep) {
      FMOE_RETURN_IF_ERROR(EndStep(layer, forward.eplb));
    }
  }
  return forward;
}

/// Bytes of weights that the tokens of a run touched: prepared bytes an expert, times experts visited, and
/// those of projections and shared experts.
int64_t BytesRead(const MoeLayer& layer, const Forward& forward) {
  std::set<int32_t> visited;
  const auto* ids = forward.topk_ids.view().as<int32_t>();
  for (int64_t slot = 0; slot < forward.topk_ids.view().count(); ++slot) {
    if (ids[slot] >= 0) {
      visited.insert(ids[slot]);
    }
  }
  const Plan& plan = layer.plan();
  const int64_t experts = std::max<int64_t>(layer.config().num_local_experts, 1);
  return plan.weight_bytes / experts * static_cast<int64_t>(visited.size()) + plan.latent_bytes +
         (plan.shared == nullptr ? 0 : plan.shared->weight_bytes);
}

Json CheckToJson(const CheckReport& report) {
  return {{"against", report.against},
          {"tokens", report.tokens},
          {"rel_l2", report.rel_l2},
          {"max_row_error", report.max_row_error},
          {"not_finite", report.not_finite},
          {"overflowed", report.overflowed},
          {"bound", report.bound.value()},
          {"bound_terms",
           {{"output_rounding", report.bound.output_rounding},
            {"input_rounding", report.bound.input_rounding},
            {"mid_rounding", report.bound.mid_rounding},
            {"accumulation", report.bound.accumulation},
            {"requantization", report.bound.requantization},
            {"activation_rounding", report.bound.activation_rounding},
            {"layout", report.bound.layout},
            {"one_event", report.bound.one_event},
            {"factor", report.bound.factor}}},
          {"ok", report.ok}};
}

/// What a run says, to programs and to people.
struct Answer {
  Json document;
  std::string text;
};

void AddCheck(const CheckReport& report, Answer& answer) {
  answer.document["check"] = CheckToJson(report);
  answer.text +=
      fmt::format("check: relative L2 {:.2e} against the reference on {}, bound {:.2e}: {}\n", report.rel_l2,
                  CountText(report.tokens, "token"), report.bound.value(), report.ok ? "ok" : "FAILED");
  answer.text += NotFiniteText(report.not_finite, report.overflowed);
}

void AddRanks(const RankGroup& ranks, const EplbTotals& eplb, Answer& answer) {
  answer.document["ranks"] = ranks.ToJson();
  if (eplb.plans > 0) {
    answer.document["eplb"] = EplbJson(eplb);
    answer.text += fmt::format(
        "placement {}: {} of {} plans carried out{}{}, balancedness {:.2f} before and {:.2f} after the "
        "last\n",
        eplb.last.epoch, eplb.switches, eplb.plans, eplb.last.kept.empty() ? "" : "; kept: ", eplb.last.kept,
        eplb.last.balancedness, eplb.last.planned_balancedness);
  }
}

void AddSpeed(const MoeLayer& layer, const Forward& forward, const RankGroup& ranks, const Executor& executor,
              Answer& answer) {
  const int64_t num_tokens = forward.output.dim(0);
  const double seconds = Median(forward.seconds);
  const double tokens_per_second = static_cast<double>(num_tokens) / seconds;
  answer.document["seconds"] = seconds;
  answer.document["tokens_per_second"] = tokens_per_second;
  const std::string speed = fmt::format(
      "{} in {:.3f} ms on {}, {:.1f} tokens/s", CountText(num_tokens, "token"), seconds * 1e3,
      layer.on_device() ? "a card" : CountText(executor.num_threads, "thread"), tokens_per_second);
  if (ranks.size() > 1) {  // rank 0 does not know what the others read
    AddRanks(ranks, forward.eplb, answer);
    answer.text += fmt::format("{} on each of {} ranks\n", speed, ranks.size());
    return;
  }
  const int64_t bytes_read = BytesRead(layer, forward);
  const double read_gbps = static_cast<double>(bytes_read) / seconds / 1e9;
  answer.document["weight_bytes_read"] = bytes_read;
  answer.document["weight_read_gbps"] = read_gbps;
  answer.text +=
      fmt::format("{}; {} of weights read at {:.1f} GB/s", speed, BytesText(bytes_read), read_gbps);
  if (forward.seconds.size() == 1) {
    answer.text += " (the first call, which touches its memory; --repeat measures)";
  } else if (!layer.on_device()) {  // what a card reads is for bench to say
    const double machine_gbps = MeasureReadBandwidth(executor) / 1e9;
    answer.document["machine_read_gbps"] = machine_gbps;
    if (machine_gbps > 0) {
      answer.document["share_of_read_bandwidth"] = read_gbps / machine_gbps;
      answer.text += fmt::format(", {:.0f} % of the {:.1f} GB/s that this machine reads",
                                 100 * read_gbps / machine_gbps, machine_gbps);
    }
  }
  answer.text += "\n";
}

/// Before anything is computed: what would be written must not lie on what is read.
Status CheckPlaces(const RunFlags& flags, const Subject& subject, const RankGroup& ranks) {
  FMOE_RETURN_IF_ERROR(CheckOutput(flags.output, {flags.input, flags.plan.tune}));
  FMOE_RETURN_IF_ERROR(CheckOutput(flags.output, subject));
  return ranks.leads() ? CheckSafetensorsPlace(flags.output) : Status::Ok();
}

void SetRank(const RunFlags& flags, const RankGroup& ranks, const InputFile& input, LayerOptions& options) {
  options.shared_experts = flags.shared_experts;
  options.max_tokens = options.plan_tokens = ranks.MaxSlice(input.num_tokens());
  options.parallel = ranks.parallel();
  options.communicator = ranks.communicator();
  options.eplb = flags.ranks.eplb;
  if (ranks.size() > 1) {  // each takes its tokens from a file that all must have been given
    options.fingerprint = input.Digest() + static_cast<uint64_t>(flags.repeat);
  }
}

/// Options that were given and changed nothing: said, not refused, since scripts give them to any layer and
/// any number of ranks.
std::vector<std::string> IdleNotes(const RunFlags& flags, const RankGroup& ranks, const Plan& plan) {
  std::vector<std::string> notes;
  if (std::string idle = IdleTune(flags.plan, plan.backend, plan.costs); !idle.empty()) {
    notes.push_back(std::move(idle));
  }
  const RankFlags defaults;
  const RankFlags& given = flags.ranks;
  const std::pair<bool, const char*> options[] = {
      {given.sizes.enable_expert_parallel, "--ep"},
      {given.sequence_parallel, "--sp"},
      {given.sizes.all2all != defaults.sizes.all2all, "--all2all"},
      {given.deadline_seconds != defaults.deadline_seconds, "--deadline"}};
  for (const auto& [is_given, name] : options) {
    if (is_given && ranks.size() == 1) {
      notes.push_back(fmt::format("{} has no effect on one rank; mpirun starts more", name));
    }
  }
  return notes;
}

Answer Describe(const RunFlags& flags, const Subject& subject, const RankGroup& ranks, const MoeLayer& layer,
                int64_t num_tokens, int num_threads, double load_seconds) {
  Answer answer;
  answer.document = {
      {"checkpoint", subject.path()},  {"layer", subject.layer()}, {"family", subject.description.family},
      {"scheme", layer.scheme().name}, {"tokens", num_tokens},     {"plan", ToJson(layer.plan())},
      {"threads", num_threads},        {"repeat", flags.repeat},   {"load_seconds", load_seconds}};
  answer.text = PlanText(layer.plan());
  std::vector<std::string> notes = layer.selection().notes;
  for (std::string& note : IdleNotes(flags, ranks, layer.plan())) {
    notes.push_back(std::move(note));
  }
  if (!notes.empty()) {
    answer.document["notes"] = notes;
    answer.text += fmt::format("note: {}\n", fmt::join(notes, "\nnote: "));
  }
  return answer;
}

Result<CheckReport> Check(const Subject& subject, const MoeLayer& layer, const InputFile& input,
                          const Forward& forward, const RunFlags& flags, const Executor& executor) {
  CheckOptions options;
  options.activation_rule = flags.plan.activation_rule;
  options.shared_experts = flags.shared_experts;
  options.executor = executor;
  const LayerLoader load = [&](const LayerOptions& other) { return subject.LoadCanonical(other); };
  return CheckAgainstReference(load, layer, input.tensors().hidden, forward.topk_ids.view(),
                               forward.topk_weights.view(), forward.output.view(), options);
}

Status RunOnRank(const RunFlags& flags, const RankGroup& ranks, Output& output) {
  FMOE_ASSIGN_OR_RETURN(LayerOptions options, Resolve(flags.plan));
  FMOE_ASSIGN_OR_RETURN(const Subject subject, OpenSubject(flags.checkpoint, flags.layer));
  FMOE_RETURN_IF_ERROR(subject.Complete(flags.plan, flags.checkpoint, options));
  FMOE_RETURN_IF_ERROR(CheckPlaces(flags, subject, ranks));
  FMOE_ASSIGN_OR_RETURN(const InputFile input, InputFile::Read(flags.input, subject.description.config));
  FMOE_ASSIGN_OR_RETURN(const std::unique_ptr<ThreadPool> pool,
                        ThreadPool::Create(ranks.Threads(flags.threads)));
  const Executor& executor = pool->executor();
  options.executor = executor;
  SetRank(flags, ranks, input, options);

  const auto start = std::chrono::steady_clock::now();
  FMOE_ASSIGN_OR_RETURN(std::unique_ptr<MoeLayer> layer, subject.Load(options));
  const double load_seconds = Seconds(start);
  const int64_t num_tokens = input.num_tokens();
  FMOE_ASSIGN_OR_RETURN(Forward forward,
                        RunLayer(*layer, RowsOf(input.tensors(), ranks.Slice(num_tokens)), flags, executor));
  for (Tensor* rows : {&forward.output, &forward.topk_ids, &forward.topk_weights}) {
    FMOE_ASSIGN_OR_RETURN(*rows, ranks.Collect(*rows, num_tokens));
  }
  if (!ranks.leads()) {
    return Status::Ok();  // rank 0 has all rows, checks and writes them
  }
  Answer answer = Describe(flags, subject, ranks, *layer, num_tokens, executor.num_threads, load_seconds);
  Status verdict = Status::Ok();
  if (flags.check) {
    FMOE_ASSIGN_OR_RETURN(const CheckReport check, Check(subject, *layer, input, forward, flags, executor));
    AddCheck(check, answer);
    if (!check.ok) {
      verdict = Status::No(fmt::format(
          "relative L2 {:.3e} against the reference exceeds the bound {:.3e}; no output was written",
          check.rel_l2, check.bound.value()));
    }
  }
  AddSpeed(*layer, forward, ranks, executor, answer);
  if (verdict.ok()) {
    const NamedTensor tensors[] = {
        {"output", forward.output}, {"topk_ids", forward.topk_ids}, {"topk_weights", forward.topk_weights}};
    FMOE_RETURN_IF_ERROR(WriteSafetensors(flags.output, tensors));
  }
  output.Document(answer.document);
  output.Text(answer.text);
  return verdict;
}

Status Run(const RunFlags& flags, Output& output) {
  const Result<RankGroup> ranks = RankGroup::Open(flags.ranks, flags.plan.device);
  const Status status = ranks.ok() ? RunOnRank(flags, *ranks, output) : ranks.status();
  if (!status.ok() && status.code() != StatusCode::kNo) {
    EndJob(ranks.ok() ? &*ranks : nullptr, status, output);
  }
  return status;
}

}  // namespace

Action DefineRun(CLI::App& app) {
  auto flags = std::make_shared<RunFlags>();
  AddCheckpoint(app, flags->checkpoint, true, kCheckpointOrPreparedHelp);
  AddLayer(app, flags->layer,
           "Decoder layer; may be left out when only one has experts, and with a prepared file");
  app.add_option(
         "--input", flags->input,
         "safetensors with hidden_states [tokens, hidden] and, where wanted, router_logits, topk_ids with "
         "topk_weights, or input_ids (token_ids)")
      ->required();
  app.add_option("--output", flags->output, "safetensors to write: output, topk_ids, topk_weights")
      ->required();
  flags->plan.activation_format.clear();
  AddPlan(app, flags->plan);
  AddActivationRule(app, flags->plan.activation_rule);
  AddPackCache(app, flags->plan.pack_cache);
  AddThreads(app, flags->threads);
  AddRanks(app, flags->ranks);
  AddBalancing(app, flags->ranks.sizes);
  AddBalancingSteps(app, flags->ranks.eplb);
  app.add_flag("--check", flags->check, "Compare with the reference backend; exit 1 beyond the bound");
  app.add_option("--repeat", flags->repeat,
                 "Run N times, report the median; with N > 1 also the bandwidth share")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 40));
  app.add_flag_callback(
      "--no-shared-experts", [flags] { flags->shared_experts = false; }, "Leave the shared experts out");
  return [flags](Output& output) { return Run(*flags, output); };
}

}  // namespace fusedmoe::cli
