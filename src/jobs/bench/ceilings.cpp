#include "jobs/bench/ceilings.hpp"

#include <algorithm>
#include <utility>

#include "platform/cuda/probe.hpp"

namespace fusedmoe::bench {

std::vector<double> Samples::Sorted() const {
  constexpr size_t kEnough = 3;
  std::vector<double> values = quiet_;
  if (values.size() < kEnough) {
    values.insert(values.end(), disturbed_.begin(), disturbed_.end());
  }
  std::sort(values.begin(), values.end());
  return values;
}

double Samples::Median() const {
  const std::vector<double> values = Sorted();
  return values.empty() ? 0.0 : values[values.size() / 2];
}

Result<CeilingSampler> CeilingSampler::Create(const Executor& executor) {
  FMOE_ASSIGN_OR_RETURN(ReadProbe probe, ReadProbe::Create(executor));
  CeilingSampler sampler(std::move(probe), executor);
  sampler.peaks_.resize(ComputeUnits().size());
  for (int round = 0; round < 5; ++round) {
    sampler.Read();
    for (const ComputeUnitInfo& info : ComputeUnits()) {
      sampler.Peak(info.unit);
    }
  }
  return sampler;
}

Result<CeilingSampler> CeilingSampler::CreateForCard() {
  CeilingSampler sampler;
  Samples reads, products;
  FMOE_RETURN_IF_ERROR(sampler.SampleCard(&reads, &products));
  return sampler;
}

Status CeilingSampler::SampleCard(Samples* reads, Samples* products) {
  FMOE_ASSIGN_OR_RETURN(const double read, cuda::MeasureReadBandwidth());
  FMOE_ASSIGN_OR_RETURN(const double product, cuda::MeasureBf16Peak());
  reads_.Add(read, true);
  products_.Add(product, true);
  reads->Add(read, true);
  products->Add(product, true);
  return Status::Ok();
}

void CeilingSampler::Read(Samples* row) {
  // The window moves on through a buffer of several last-level caches, so that it is always cold.
  constexpr int64_t kWindow = int64_t{32} << 20;
  const int64_t before = TimesPreempted();
  const double rate = probe_->Sample(executor_, kWindow);
  const bool quiet = TimesPreempted() == before;
  reads_.Add(rate, quiet);
  if (row != nullptr) {
    row->Add(rate, quiet);
  }
}

void CeilingSampler::Peak(ComputeUnit unit, Samples* row) {
  const int64_t before = TimesPreempted();
  const double rate = SamplePeak(unit, executor_);
  const bool quiet = TimesPreempted() == before;
  peaks_[static_cast<size_t>(unit)].Add(rate, quiet);
  if (row != nullptr) {
    row->Add(rate, quiet);
  }
}

BenchCeilings CeilingSampler::ceilings() const {
  BenchCeilings ceilings;
  ceilings.read = reads_.Median();
  if (!probe_) {
    ceilings.peaks.push_back({std::string(kCardUnit), "bf16_gflops", products_.Median()});
    return ceilings;
  }
  for (const ComputeUnitInfo& info : ComputeUnits()) {
    const double rate = peaks_[static_cast<size_t>(info.unit)].Median();
    if (rate > 0) {
      ceilings.peaks.push_back({std::string(info.name), std::string(info.ceiling), rate});
    }
  }
  return ceilings;
}

}  // namespace fusedmoe::bench
