#include <fusedmoe/problems.hpp>

#include <fmt/format.h>

namespace fusedmoe {
namespace {

Status CheckSchemeSizes(const MoeConfig& config, const Scheme& scheme) {
  const GroupShape& block = scheme.weight.block;
  if (!scheme.weight.has_block_scale() || block.row != 1 || block.col < 2) {
    return Status::Ok();
  }
  struct Field {
    const char* name;
    int64_t size;
  };
  for (const Field& field : {Field{config.latent > 0 ? "latent" : "hidden", config.expert_hidden()},
                             Field{"intermediate", config.intermediate}}) {
    if (field.size % block.col != 0) {
      return Status::BadInput(fmt::format("'{}' is {}; scheme {} needs a multiple of its groups of {}",
                                          field.name, field.size, scheme.name, block.col));
    }
  }
  return Status::Ok();
}

}  // namespace

Result<Scheme> ParseSchemeFor(const MoeConfig& config, std::string_view name) {
  const int64_t reductions[] = {config.expert_hidden(), config.intermediate};
  FMOE_ASSIGN_OR_RETURN(Scheme scheme, ParseScheme(name, reductions));
  FMOE_RETURN_IF_ERROR(CheckSchemeSizes(config, scheme));
  return scheme;
}

}  // namespace fusedmoe
