// Threads that run one job together, phase by phase. They are woken once per job and meet at a barrier after each phase.
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

// Learns whether jobs of one kind end sooner in all threads or in the caller's alone. Where one core reads nearly as fast as the memory can
// be read, or where other programs use the cores, so that threads wait for each other's turn at every barrier, more threads only disturb.
// The other way is tried now and then, the less often the more it loses, and in turns with the usual one: jobs that follow each other have
// about the same size. The quickest jobs decide, because other programs only add time, and one try is enough if it loses by far.
// Threads must gain more than they take from what else the cores have to do between two jobs, such as sending tokens.
class Habit {
 public:
  explicit Habit(bool is_alone = false) : is_alone_(is_alone) {}

  bool is_alone() const { return is_alone_ != is_trial(); }
  bool usual() const { return is_alone_; }

  void record(double seconds) {
    if (turns_ == 0) {
      if (--left_ == 0) turns_ = TURNS, usual_ = tried_ = NEVER;
      return;
    }
    double& quickest = is_trial() ? tried_ : usual_;
    quickest = std::min(quickest, seconds);
    const bool has_lost = tried_ < NEVER && tried_ > usual_ * FAR;
    if (--turns_ && !has_lost) return;
    turns_ = 0;
    if (is_alone_ ? tried_ * GAIN < usual_ : tried_ < usual_ * GAIN) {
      is_alone_ = !is_alone_;
      wait_ = LEAST;
    } else {
      wait_ = std::min(2 * wait_, MOST);
    }
    left_ = wait_;
  }

 private:
  bool is_trial() const { return turns_ % 2; }

  static constexpr int TURNS = 6, LEAST = 8, FIRST = 32, MOST = 256;  // jobs
  static constexpr double GAIN = 1.2, FAR = 1.5, NEVER = 1e9;
  bool is_alone_;
  int wait_ = FIRST, left_ = FIRST, turns_ = 0;
  double usual_ = NEVER, tried_ = NEVER;
};

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

  // Threads that run the current job.
  int working() const { return is_alone_ ? 1 : threads_; }

  // Runs the job in every thread, or in the caller's alone, and returns when it has ended.
  template <class Job>
  void run(bool is_alone, const Job& job) {
    is_alone_ = is_alone || threads_ == 1;
    next_.store(0);
    if (is_alone_) return job(0);
    std::function<void(int)> called = [&](int thread) { job(thread); };
    job_ = &called;
    start_.fetch_add(1);
    start_.notify_all();
    job(0);
    meet();
  }

  // `run` as the habit says.
  template <class Job>
  void run(Habit& habit, const Job& job) {
    const auto started = std::chrono::steady_clock::now();
    run(habit.is_alone(), job);
    habit.record(std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count());
  }

  // Inside a job: runs `tasks(first, end)` for parts of `count` tasks, shared among the threads, and waits for all. A thread claims
  // neighbouring tasks, whose weights it reads in one go: half of its share of those that are left, so that all end at about the same time.
  template <class Tasks>
  void share_parts(int count, const Tasks& tasks) {
    for (int first = next_.load(); first < count;) {
      const int end = first + std::max(1, (count - first) / (2 * working()));
      if (!next_.compare_exchange_weak(first, end)) continue;
      tasks(first, end);
      first = next_.load();
    }
    meet();
  }
  // The same for `task(i)` of each i below `count`.
  template <class Task>
  void share(int count, const Task& task) {
    share_parts(count, [&](int first, int end) {
      for (int i = first; i < end; i++) task(i);
    });
  }

 private:
  void serve(int thread) {
    for (int seen = 0;;) {
      // A step follows the last one closely, and waking a thread takes long, so it looks for the step before it sleeps. Meanwhile,
      // others may have its core.
      for (int spins = 0; start_.load(std::memory_order_acquire) == seen && spins < IDLE_SPINS; spins++)
        if (spins % SPINS) pause();
        else sched_yield();
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
    while (phase_.load(std::memory_order_acquire) == seen) sched_yield();  // there are more threads than free cores
  }

  static constexpr int SPINS = 4000;  // some 50 us
  static constexpr int IDLE_SPINS = 50 * SPINS;
  const int threads_;
  std::vector<std::thread> others_;
  const std::function<void(int)>* job_ = nullptr;
  bool is_alone_ = true;
  std::atomic<int> start_{0};
  alignas(64) std::atomic<int> next_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> phase_{0};
};

}  // namespace outrider
