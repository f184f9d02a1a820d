// A parallel loop on XLA's thread pool.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace jax_dma::cpu {

struct Pool {
  int64_t threads = 0;
  std::function<void(std::function<void()>)> schedule;
};

// Subnormal numbers are zero inside. XLA sets this on some of its threads and not on others, and a result must not
// depend on which of them computed it (nor pay for subnormals, which are slow).
class FlushSubnormals {
 public:
#if defined(__SSE__)
  FlushSubnormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040); }  // FTZ, DAZ
  ~FlushSubnormals() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__) && defined(__GNUC__)
  FlushSubnormals() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(saved_ | (uint64_t{1} << 24)));
  }
  ~FlushSubnormals() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }

 private:
  uint64_t saved_;
#endif
};

using Worker = std::function<void(int64_t index)>;

// Calls a worker for every index in [0, count), each exactly once, in ascending order of starting. `make_worker` is
// called once on each thread that takes part, to give it scratch memory of its own. Rethrows the first exception.
//
// The caller may itself be a pool thread, and a scheduled helper may run late or never, so nothing waits for a helper
// to start: all threads pull indices from one counter, the caller among them, and at the end the caller waits only for
// indices that a running helper has pulled. A helper that comes late finds none left and touches only the shared state.
inline void parallel_for(const Pool& pool, int64_t count, const std::function<Worker()>& make_worker) {
  struct State {
    std::atomic<int64_t> next{0};
    int64_t count = 0;
    const std::function<Worker()>* make_worker = nullptr;  // alive while an index is unfinished
    std::mutex mutex;
    std::condition_variable all_finished;
    int64_t finished = 0;
    std::exception_ptr error;

    void run() {
      int64_t index = next.fetch_add(1);
      if (index >= count) return;
      FlushSubnormals flush;
      int64_t mine = 0;
      std::exception_ptr failure;
      {
        Worker worker;
        for (; index < count; index = next.fetch_add(1), ++mine) {
          if (failure) continue;  // keeps counting, so that the caller is released
          try {
            if (!worker) worker = (*make_worker)();
            worker(index);
          } catch (...) {
            failure = std::current_exception();
          }
        }
      }
      std::lock_guard<std::mutex> lock(mutex);
      if (failure && !error) error = failure;
      finished += mine;
      if (finished == count) all_finished.notify_all();
    }
  };

  auto state = std::make_shared<State>();
  state->count = count;
  state->make_worker = &make_worker;
  const int64_t helpers = std::min(pool.threads, count) - 1;
  for (int64_t i = 0; i < helpers; ++i) pool.schedule([state] { state->run(); });
  state->run();
  std::unique_lock<std::mutex> lock(state->mutex);
  state->all_finished.wait(lock, [&] { return state->finished == count; });
  if (state->error) std::rethrow_exception(state->error);
}

}  // namespace jax_dma::cpu
