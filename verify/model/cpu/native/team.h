// Threads that run one job together, phase by phase. They are woken once per job and meet at a barrier after each phase. Where other
// programs use the cores, threads wait for each other's turn at every barrier; then the caller's thread runs some jobs alone.
#pragma once
#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <sched.h>
#include <thread>
#include <vector>

namespace outrider {

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class Team {
 public:
  explicit Team(int threads) : threads_(threads) {
    for (int thread = 1; thread < threads; thread++) others_.emplace_back([this, thread] { serve(thread); });
  }
  ~Team() {
    job_ = nullptr;
    start_.fetch_add(1);
    start_.notify_all();
    for (auto& other : others_) other.join();
  }

  int threads() const { return threads_; }

  // Runs the job in every thread, and returns when all have ended. A small job runs in the caller's thread only.
  template <class Job>
  void run(bool is_small, const Job& job) {
    is_alone_ = threads_ == 1 || is_small || jobs_alone_ > 0;
    next_.store(0);
    if (is_alone_) {
      jobs_alone_ = std::max(0, jobs_alone_ - 1);
      return job(0);
    }
    std::function<void(int)> called = [&](int thread) { job(thread); };
    job_ = &called;
    waited_.store(0);
    const auto started = Clock::now();
    start_.fetch_add(1);
    start_.notify_all();
    job(0);
    meet();
    const int64_t all = std::chrono::nanoseconds(Clock::now() - started).count() * threads_;
    again_ = waited_.load() * 4 > all ? std::min(2 * again_, MOST_ALONE) : 4;
    if (again_ > 4) jobs_alone_ = again_;
  }

  // Inside a job: runs `task(i)` for each i below `count`, shared among the threads, and waits for all.
  template <class Task>
  void share(int count, const Task& task) {
    for (int i; (i = next_.fetch_add(1)) < count;) task(i);
    meet();
  }

 private:
  void serve(int thread) {
    for (int seen = 0;;) {
      // A step follows the last one closely, and waking a thread takes long, so it looks for the step before it sleeps. Meanwhile,
      // others may have its core.
      for (int spins = 0; start_.load(std::memory_order_acquire) == seen && spins < IDLE_SPINS; spins++)
        if (spins % SPINS)
          pause();
        else
          sched_yield();
      start_.wait(seen);
      seen++;
      if (!job_) return;
      (*job_)(thread);
      meet();
    }
  }

  // Returns when all threads have arrived. The last one lets `share` begin again.
  void meet() {
    if (is_alone_) return next_.store(0);
    const int seen = phase_.load();
    if (arrived_.fetch_add(1) == threads_ - 1) {
      arrived_.store(0);
      next_.store(0);
      phase_.store(seen + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; spins < SPINS; spins++) {
      if (phase_.load(std::memory_order_acquire) != seen) return;
      pause();
    }
    const auto started = Clock::now();
    while (phase_.load(std::memory_order_acquire) == seen) sched_yield();  // there are more threads than free cores
    waited_.fetch_add(std::chrono::nanoseconds(Clock::now() - started).count());
  }

  using Clock = std::chrono::steady_clock;
  static constexpr int MOST_ALONE = 64;   // jobs, until the threads try again
  static constexpr int SPINS = 4000;  // some 50 us
  static constexpr int IDLE_SPINS = 50 * SPINS;
  const int threads_;
  std::vector<std::thread> others_;
  const std::function<void(int)>* job_ = nullptr;
  bool is_alone_ = true;
  int jobs_alone_ = 0, again_ = 4;
  std::atomic<int64_t> waited_{0};  // nanoseconds at barriers, of all threads
  std::atomic<int> start_{0};
  alignas(64) std::atomic<int> next_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> phase_{0};
};

}  // namespace outrider
