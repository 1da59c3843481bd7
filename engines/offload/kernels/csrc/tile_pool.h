// Threads that share the parts of products, and never wait for a part whose thread has lost its CPU: they do it again.
//
// A task is cut into parts. Threads take parts from one counter, so whoever is late takes fewer. A part is computed into
// the thread's own scratch memory and then written out by whoever is first to claim it. When no part is left to take,
// the thread that waits for the task computes parts that others have begun and not written: a thread that another process
// has pushed off its CPU costs the time of its part, not a time slice. Such a thread may wake up when the task is long
// over. So a task holds its operands until the last thread has left it, and what the caller owns is touched by the
// thread that claims a part only.
//
// Source: backup tasks are MapReduce's (Dean and Ghemawat 2004, section 3.6).

#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#ifdef __x86_64__
#include <immintrin.h>
#endif

#include "aligned.h"

namespace {

inline void relax() {
#ifdef __x86_64__
  _mm_pause();
#endif
}

class Task {
 public:
  explicit Task(int parts) : parts_(parts), claimed_(new std::atomic<bool>[parts]) {
    for (int i = 0; i < parts; ++i) claimed_[i] = false;
  }
  virtual ~Task() = default;

  // The next part that nobody has begun, or -1.
  int take() {
    if (next_.load(std::memory_order_relaxed) >= parts_) return -1;
    const int part = next_.fetch_add(1, std::memory_order_relaxed);
    return part < parts_ ? part : -1;
  }

  bool all_taken() const { return next_.load(std::memory_order_relaxed) >= parts_; }
  bool done() const { return written_.load(std::memory_order_acquire) == parts_; }
  bool written(int part) const { return claimed_[part].load(std::memory_order_relaxed); }
  int parts() const { return parts_; }

  // The most scratch memory that a part takes.
  virtual size_t scratch_bytes() const { return 0; }

  void run(int part, Aligned& scratch) {
    compute(part, scratch);
    if (claimed_[part].exchange(true)) return;
    write(part, scratch);
    written_.fetch_add(1, std::memory_order_release);
  }

 protected:
  // Reads operands that the task owns, or that live as long as the pool.
  virtual void compute(int part, Aligned& scratch) const = 0;
  virtual void write(int part, Aligned& scratch) const = 0;

 private:
  const int parts_;
  std::atomic<int> next_{0}, written_{0};
  std::unique_ptr<std::atomic<bool>[]> claimed_;
};

class TilePool {
 public:
  // The caller of `wait` is the last of `threads` threads.
  explicit TilePool(int threads) {
    try {
      for (int i = 1; i < threads; ++i) workers_.emplace_back([this] { work(); });
    } catch (const std::system_error&) {  // the system's limit of threads: those that there are share the work
    }
  }

  ~TilePool() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      closing_ = true;
    }
    more_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

  // Throws std::bad_alloc, and adds nothing, where there is no memory for the caller's part of the task; `wait` takes
  // none.
  void add(std::shared_ptr<Task> task) {
    scratch_.at_least(task->scratch_bytes());
    {
      std::lock_guard<std::mutex> lock(mutex_);
      queue_.push_back(std::move(task));
      added_.fetch_add(1, std::memory_order_release);
    }
    if (asleep_.load() > 0) more_.notify_all();
  }

  // Returns when no thread is inside a task, late ones included. All tasks must be done.
  void settle() {
    while (busy_.load(std::memory_order_acquire) > 0) std::this_thread::yield();
  }

  // Forgets tasks of which all parts have been begun.
  void drop_begun() {
    std::lock_guard<std::mutex> lock(mutex_);
    while (!queue_.empty() && queue_.front()->all_taken()) queue_.pop_front();
  }

  // Computes, with the other threads, until `task` is done; tasks that were added before it come first.
  void wait(const std::shared_ptr<Task>& task) {
    using Clock = std::chrono::steady_clock;
    Clock::duration part_time = kLeastPatience;
    while (!task->done()) {
      if (const std::shared_ptr<Task> open = next_open()) {
        for (int part; !task->done() && (part = open->take()) >= 0;) {
          const auto began = Clock::now();
          open->run(part, scratch_);
          part_time = Clock::now() - began;
        }
        continue;
      }
      // All parts have been begun. A thread that has its CPU is done within the time of a part, before it could be done
      // again.
      const auto until = Clock::now() + std::clamp<Clock::duration>(part_time, kLeastPatience, kMostPatience);
      while (!task->done() && Clock::now() < until) relax();
      for (int part = 0; part < task->parts() && !task->done(); ++part)
        if (!task->written(part)) task->run(part, scratch_);
      if (!task->done()) std::this_thread::yield();  // somebody writes: a copy of some kilobytes
    }
  }

 private:
  static constexpr std::chrono::microseconds kLeastPatience{100}, kMostPatience{1000}, kSpin{30};

  std::shared_ptr<Task> next_open() {
    std::lock_guard<std::mutex> lock(mutex_);
    while (!queue_.empty() && queue_.front()->all_taken()) queue_.pop_front();
    return queue_.empty() ? nullptr : queue_.front();
  }

  // A worker computes parts until none is open. A part that it has no memory for is one that it has begun and does not
  // write: whoever waits computes it.
  void compute(Aligned& scratch) {
    busy_.fetch_add(1);  // before it looks for a task: `settle` must not miss it
    try {
      while (const std::shared_ptr<Task> open = next_open())
        for (int part; (part = open->take()) >= 0;) open->run(part, scratch);
    } catch (const std::bad_alloc&) {
    }
    busy_.fetch_sub(1, std::memory_order_release);
  }

  void work() {
    Aligned scratch;
    while (true) {
      compute(scratch);
      // Between two products of a layer there is little time: look for the next one before sleeping.
      const uint64_t seen = added_.load(std::memory_order_acquire);
      const auto until = std::chrono::steady_clock::now() + kSpin;
      while (added_.load(std::memory_order_acquire) == seen && std::chrono::steady_clock::now() < until) relax();
      std::unique_lock<std::mutex> lock(mutex_);
      asleep_.fetch_add(1);
      more_.wait(lock, [&] { return closing_ || added_.load(std::memory_order_relaxed) != seen || open_locked(); });
      asleep_.fetch_sub(1);
      if (closing_) return;
    }
  }

  bool open_locked() const { return !queue_.empty() && !queue_.back()->all_taken(); }

  std::mutex mutex_;
  std::condition_variable more_;
  std::deque<std::shared_ptr<Task>> queue_;
  std::atomic<uint64_t> added_{0};
  std::atomic<int> asleep_{0}, busy_{0};
  bool closing_ = false;
  Aligned scratch_;
  std::vector<std::thread> workers_;
};

}  // namespace
