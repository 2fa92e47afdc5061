#include "conformance/drawn_case.hpp"

#include <algorithm>
#include <memory>
#include <numeric>
#include <ostream>
#include <random>

#include <fusedmoe/quant.hpp>

#include "support/random_layer.hpp"

namespace fusedmoe::conformance {
namespace {

using testing_support::MakeRandomLayer;

class Dice {
 public:
  explicit Dice(uint64_t seed) : random_(seed) {}
  int64_t Below(int64_t count) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(count)); }
  bool OneIn(int64_t count) { return Below(count) == 0; }
  template <typename T>
  T Of(std::initializer_list<T> values) {
    return values.begin()[Below(static_cast<int64_t>(values.size()))];
  }
  std::mt19937_64& random() { return random_; }

 private:
  std::mt19937_64 random_;
};

// A reduction size: a multiple of the groups along K of weights and activations; blocks may be partial.
int64_t DrawSize(const Scheme& scheme, Dice& dice) {
  int64_t group = std::max<int64_t>(scheme.weight.block.row > 1 ? 1 : scheme.weight.block.col, 1);
  group = std::lcm(group, std::max<int64_t>(scheme.activation.group.col, 1));
  if (scheme.weight.block.row > 1) {
    group = 1;
  }
  if (group == 1) {
    return dice.Of<int64_t>({72, 40, 1, 33, 130, 200, 64, 256, 7});
  }
  return group * dice.Of<int64_t>(group >= 128 ? std::initializer_list<int64_t>{1, 2, 3}
                                               : std::initializer_list<int64_t>{1, 2, 3, 5, 8});
}

ActivationSpec DrawActivation(Dice& dice) {
  ActivationSpec spec;
  spec.kind = static_cast<ActivationKind>(dice.OneIn(3) ? 0 : dice.Below(kActivationKinds));
  if (spec.kind == ActivationKind::kSwigluOai) {
    spec.alpha = 1.702F;
    spec.beta = 1.0F;
    spec.limit = dice.Of({7.0F, 1.5F});
  } else if (spec.kind == ActivationKind::kSwigluStep ||
             (spec.kind == ActivationKind::kSilu && dice.OneIn(4))) {
    spec.limit = dice.Of({7.0F, 1.0F});
  }
  return spec;
}

void DrawSmoothing(CanonicalMatrix& matrix, Dice& dice) {
  Tensor scale = *Tensor::Allocate(DType::kF32, {matrix.cols});
  std::uniform_real_distribution<float> factor(0.5F, 2.0F);
  std::generate_n(scale.mutable_view().as<float>(), matrix.cols, [&] { return factor(dice.random()); });
  matrix.pre_quant_scale = std::move(scale);
}

}  // namespace

DrawnCase Draw(const std::string& scheme_name, uint64_t seed) {
  const Scheme scheme = *ParseScheme(scheme_name);
  Dice dice(std::hash<std::string>{}(scheme_name)*31 + seed);
  DrawnCase drawn;
  drawn.scheme = scheme_name;
  drawn.seed = seed;
  MoeConfig& config = drawn.config;
  config.num_experts = config.num_local_experts = 1 + dice.Below(6);
  config.routing.top_k =
      dice.OneIn(4) ? config.num_experts : 1 + dice.Below(std::min<int64_t>(config.num_experts, 3));
  config.hidden = DrawSize(scheme, dice);
  config.intermediate = DrawSize(scheme, dice);
  config.activation = DrawActivation(dice);
  config.has_bias = dice.OneIn(2);
  config.apply_router_weight_on_input = config.routing.top_k == 1 && dice.OneIn(2);
  drawn.dtype = config.dtype = dice.Of({DType::kBF16, DType::kBF16, DType::kF16, DType::kF32});
  drawn.tokens = dice.Of<int64_t>({1, 2, 3, 5, 9, 17, 33, 70});
  drawn.source = MakeRandomLayer(config, scheme_name, seed).source;
  const bool grouped = scheme.weight.may_have_zero_point && scheme.weight.block.col > 1;
  drawn.group_index = grouped && dice.OneIn(4);
  drawn.pre_quant_scale = scheme.weight.quantized() && dice.OneIn(8);
  auto experts = std::make_shared<std::vector<CanonicalExpert>>();
  for (int64_t index = 0; index < config.num_experts; ++index) {
    CanonicalExpert expert = *drawn.source.load(index);
    for (CanonicalMatrix* matrix : {&expert.gate, &expert.up, &expert.down}) {
      if (!matrix->empty() && drawn.group_index) {
        testing_support::ShuffleGroups(*matrix, dice.random());
      }
    }
    if (drawn.pre_quant_scale) {
      DrawSmoothing(expert.up, dice);
      if (!expert.gate.empty()) {
        expert.gate.pre_quant_scale = expert.up.pre_quant_scale;  // they read one input
      }
      DrawSmoothing(expert.down, dice);
    }
    experts->push_back(std::move(expert));
  }
  drawn.source.load = [experts](int64_t expert) -> Result<CanonicalExpert> {
    return (*experts)[static_cast<size_t>(expert)];
  };
  return drawn;
}

Batch MakeBatch(const DrawnCase& drawn) {
  Batch batch{testing_support::RandomRows(drawn.tokens, drawn.config.hidden, drawn.dtype, drawn.seed + 1),
              testing_support::MakeRandomRouting(drawn.tokens, drawn.config.top_k(), drawn.config.num_experts,
                                                 drawn.seed + 2)};
  for (size_t slot = 0; slot < batch.routing.ids.size(); ++slot) {
    if (drawn.seed % 3 == 0 && slot % 7 == 3) {
      batch.routing.ids[slot] = -1;
    }
  }
  return batch;
}

std::ostream& operator<<(std::ostream& stream, const DrawnCase& drawn) {
  const MoeConfig& config = drawn.config;
  const ActivationSpec& activation = config.activation;
  return stream << drawn.scheme << " seed=" << drawn.seed << " E=" << config.num_experts
                << " top_k=" << config.top_k() << " H=" << config.hidden << " I=" << config.intermediate
                << " M=" << drawn.tokens << " " << DTypeName(drawn.dtype) << " "
                << ActivationName(activation.kind) << " limit=" << activation.limit
                << (config.has_bias ? " bias" : "")
                << (config.apply_router_weight_on_input ? " weight_on_input" : "")
                << (drawn.group_index ? " group_index" : "")
                << (drawn.pre_quant_scale ? " pre_quant_scale" : "");
}

}  // namespace fusedmoe::conformance
