// Parallel loops on the OpenMP pool that torch already runs.
#pragma once

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

}  // namespace bytetx::cpu
