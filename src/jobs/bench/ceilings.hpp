#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include <fusedmoe/executor.hpp>
#include <fusedmoe/jobs/bench.hpp>
#include <fusedmoe/probe.hpp>

#include "platform/ceilings.hpp"

namespace fusedmoe::bench {

/// The unit of the card's kernels that is measured, as plans and rows name it. Those of bytes, tensor_fp8 and
/// tensor_int8, do twice its products.
inline constexpr std::string_view kCardUnit = "tensor_bf16";

/// Values of repeated measurements. Those during which the system gave a core to somebody else count only
/// when there are no more than a few others.
class Samples {
 public:
  void Add(double value, bool quiet) { (quiet ? quiet_ : disturbed_).push_back(value); }

  /// Values that count, ascending.
  std::vector<double> Sorted() const;
  /// The middle one (the upper of two); 0 of nothing.
  double Median() const;
  int64_t num_quiet() const { return static_cast<int64_t>(quiet_.size()); }
  int64_t num_disturbed() const { return static_cast<int64_t>(disturbed_.size()); }

 private:
  std::vector<double> quiet_, disturbed_;
};

/// Samples of the ceilings of this run, taken between those of the rows: what else runs on the machine then
/// slows both alike.
class CeilingSampler {
 public:
  static Result<CeilingSampler> Create(const Executor& executor);

  /// The same of the card: all its kernels run on the tensor cores, so that there is one unit.
  static Result<CeilingSampler> CreateForCard();

  /// Samples both ceilings of the card, remembered here and added to those of a row.
  Status SampleCard(Samples* reads, Samples* products);

  /// One sample of a few milliseconds, remembered here and added to those of a row.
  void Read(Samples* row = nullptr);
  void Peak(ComputeUnit unit, Samples* row = nullptr);
  /// Medians of everything sampled.
  BenchCeilings ceilings() const;

 private:
  CeilingSampler() = default;
  explicit CeilingSampler(ReadProbe probe, const Executor& executor)
      : probe_(std::move(probe)), executor_(executor) {}
  std::optional<ReadProbe> probe_;  // none for a card
  Executor executor_;
  Samples reads_;
  std::vector<Samples> peaks_;  // by unit
  Samples products_;            // of a card
};

}  // namespace fusedmoe::bench
