#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include <fusedmoe/communicator.hpp>

namespace fusedmoe::test {

/// Passes everything on: what tests override to watch or to spoil what ranks send each other.
class ForwardingCommunicator : public Communicator {
 public:
  explicit ForwardingCommunicator(std::shared_ptr<Communicator> inner) : inner_(std::move(inner)) {}
  std::string_view name() const override { return inner_->name(); }
  int64_t rank() const override { return inner_->rank(); }
  int64_t size() const override { return inner_->size(); }
  int64_t sequence() const override { return inner_->sequence(); }
  int64_t bytes_sent() const override { return inner_->bytes_sent(); }
  void Abort(int exit_code) override { inner_->Abort(exit_code); }
  Status Start(const RowExchange& exchange) override { return inner_->Start(exchange); }
  Status Wait() override { return inner_->Wait(); }
  std::string describe() const override { return inner_->describe(); }
  bool on_cards() const override { return inner_->on_cards(); }
  Status Enqueue(std::span<const RowExchange> exchanges, void* stream) override {
    return inner_->Enqueue(exchanges, stream);
  }
  Status Finish(void* stream) override { return inner_->Finish(stream); }
  void GiveUp(const Status& why) override { inner_->GiveUp(why); }

 private:
  std::shared_ptr<Communicator> inner_;
};

}  // namespace fusedmoe::test
