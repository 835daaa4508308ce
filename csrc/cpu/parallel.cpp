#include "cpu/parallel.h"

#include <atomic>
#include <exception>
#include <thread>
#include <vector>

#if defined(__unix__) || defined(__APPLE__)
#include <dlfcn.h>
#endif

namespace bytetx::cpu {
namespace {

using GompParallel = void (*)(void (*fn)(void*), void* data, unsigned num_threads, unsigned flags);

GompParallel find_gomp_parallel() {
#if defined(__unix__) || defined(__APPLE__)
    return reinterpret_cast<GompParallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
#else
    return nullptr;
#endif
}

// One parallel loop, shared by the threads that work on it.
struct Loop {
    int64_t num_tasks;
    int64_t grain;
    void (*body)(void* data, int64_t begin, int64_t end);
    void* data;
    std::atomic<int64_t> next{0};
    std::atomic<bool> has_failed{false};
    std::exception_ptr error{};

    // Draws pieces until none is left. Nothing may be thrown through the OpenMP runtime.
    void work() noexcept {
        while (!has_failed.load(std::memory_order_relaxed)) {
            const int64_t begin = next.fetch_add(grain, std::memory_order_relaxed);
            if (begin >= num_tasks) return;
            const int64_t end = begin + grain < num_tasks ? begin + grain : num_tasks;
            try {
                body(data, begin, end);
            } catch (...) {
                if (!has_failed.exchange(true)) error = std::current_exception();
            }
        }
    }
};

void run_on_own_threads(Loop& loop, int32_t num_threads) {
    std::vector<std::thread> threads;
    threads.reserve(num_threads - 1);
    for (int32_t i = 1; i < num_threads; ++i) threads.emplace_back([&] { loop.work(); });
    loop.work();
    for (std::thread& thread : threads) thread.join();
}

}  // namespace

void parallel_run(int64_t num_tasks, int64_t grain, int32_t num_threads,
                  void (*body)(void* data, int64_t begin, int64_t end), void* data) {
    static const GompParallel gomp_parallel = find_gomp_parallel();
    if (num_tasks <= 0) return;
    if (grain < 1) grain = 1;
    const int64_t num_pieces = (num_tasks + grain - 1) / grain;
    if (num_threads > num_pieces) num_threads = static_cast<int32_t>(num_pieces);
    if (num_threads <= 1) return body(data, 0, num_tasks);
    Loop loop{.num_tasks = num_tasks, .grain = grain, .body = body, .data = data};
    if (gomp_parallel != nullptr) {
        gomp_parallel([](void* p) { static_cast<Loop*>(p)->work(); }, &loop,
                      static_cast<unsigned>(num_threads), 0);
    } else {
        run_on_own_threads(loop, num_threads);
    }
    if (loop.error) std::rethrow_exception(loop.error);
}

}  // namespace bytetx::cpu
