// Parallel loops on the OpenMP pool that torch already runs.
#pragma once

#include <atomic>
#include <cstdint>

namespace bytetx::cpu {

// Runs body(data, begin, end) over [0, num_tasks) in pieces of at most `grain` tasks that
// num_threads threads draw from one counter, and returns when all are done. The first exception
// that a piece throws is thrown again here; the pieces not yet begun are then dropped.
//
// The threads are those of the process's own OpenMP runtime (GOMP_parallel, looked up at run time:
// torch loads libgomp or libiomp5, both export it). A pool of our own would share the cores with
// that pool's workers, which spin for a while after each oneDNN call. Where the process has no
// such runtime, threads are started for the call.
void parallel_run(int64_t num_tasks, int64_t grain, int32_t num_threads,
                  void (*body)(void* data, int64_t begin, int64_t end), void* data);

// parallel_run for a callable body(begin, end).
template <typename Body>
void parallel_for(int64_t num_tasks, int64_t grain, int32_t num_threads, Body&& body) {
    auto call = [](void* data, int64_t begin, int64_t end) {
        (*static_cast<decltype(&body)>(data))(begin, end);
    };
    parallel_run(num_tasks, grain, num_threads, call,
                 const_cast<void*>(static_cast<const void*>(&body)));
}

// The threads of one call, and where they wait for one another.
class Team {
  public:
    explicit Team(int32_t size) : size_(size) {}

    int32_t size() const { return size_; }

    // Calls body(begin, end) over [0, num_tasks) in pieces of `grain` that the threads draw, and
    // waits for all; every thread of the team calls it alike. The last one to arrive calls after()
    // before the others go on: what costs less than to meet once more.
    template <typename Body, typename After>
    void share(int64_t num_tasks, int64_t grain, Body&& body, After&& after) {
        for (int64_t begin; (begin = draw(grain)) < num_tasks;) {
            body(begin, begin + grain < num_tasks ? begin + grain : num_tasks);
        }
        const uint32_t round = round_.load(std::memory_order_acquire);
        if (!arrive()) return await(round);
        after();
        release(round);
    }
    template <typename Body>
    void share(int64_t num_tasks, int64_t grain, Body&& body) {
        share(num_tasks, grain, body, [] {});
    }

  private:
    // The next number of a counter that release() sets back to 0.
    int64_t draw(int64_t count) { return next_.fetch_add(count, std::memory_order_relaxed); }

    // Whether all others have arrived; what they wrote before is then seen.
    bool arrive() {
        return size_ == 1 || arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_;
    }
    void release(uint32_t round);  // pairs with await()
    void await(uint32_t round);

    const int32_t size_;
    alignas(64) std::atomic<int64_t> next_{0};
    alignas(64) std::atomic<int32_t> arrived_{0};
    alignas(64) std::atomic<uint32_t> round_{0};
};

// Runs body(data, team, thread) on num_threads threads of the same pool, or fewer where the runtime
// has no more, and returns when all have ended. body must not throw.
void run_team(int32_t num_threads, void (*body)(void* data, Team& team, int32_t thread),
              void* data);

// run_team for a callable body(team, thread).
template <typename Body>
void with_team(int32_t num_threads, Body&& body) {
    auto call = [](void* data, Team& team, int32_t thread) {
        (*static_cast<decltype(&body)>(data))(team, thread);
    };
    run_team(num_threads, call, const_cast<void*>(static_cast<const void*>(&body)));
}

}  // namespace bytetx::cpu
