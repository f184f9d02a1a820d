// The XLA FFI handlers of the host kernels.
#include <exception>
#include <functional>
#include <string>
#include <utility>

#include "../common/parse.h"
#include "attention.h"

namespace jax_dma::cpu {
namespace {

ffi::Error run(bool is_backward, ffi::ThreadPool threads, const Config& config, ffi::RemainingArgs args,
               ffi::RemainingRets rets) {
  const ffi::ErrorOr<Problem> problem = Parser(config, args, rets).parse(is_backward);
  if (problem.has_error()) return problem.error();
  const Pool pool = {threads.num_threads(), [&](std::function<void()> task) { threads.Schedule(std::move(task)); }};
  try {
    (is_backward ? backward : forward)(*problem, pool);
  } catch (const std::exception& error) {
    const std::string pass = is_backward ? "backward" : "forward";
    return ffi::Error::Internal("jax_dma: the " + pass + " pass failed: " + error.what());
  }
  return ffi::Error::Success();
}

ffi::Error run_forward(ffi::ThreadPool threads, Config config, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  return run(false, threads, config, args, rets);
}

ffi::Error run_backward(ffi::ThreadPool threads, Config config, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  return run(true, threads, config, args, rets);
}

}  // namespace
}  // namespace jax_dma::cpu

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jax_dma_cpu_forward, jax_dma::cpu::run_forward,
    xla::ffi::Ffi::Bind().Ctx<xla::ffi::ThreadPool>().Attr<jax_dma::Config>("config").RemainingArgs().RemainingRets());

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jax_dma_cpu_backward, jax_dma::cpu::run_backward,
    xla::ffi::Ffi::Bind().Ctx<xla::ffi::ThreadPool>().Attr<jax_dma::Config>("config").RemainingArgs().RemainingRets());
