#include "cpu/parallel.h"

#include <atomic>
#include <chrono>
#include <exception>
#include <optional>
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

// A function of the library that has GOMP_parallel: a process may hold two OpenMP runtimes.
template <typename Function>
Function find_beside(GompParallel gomp_parallel, const char* name) {
#if defined(__unix__) || defined(__APPLE__)
    Dl_info info{};
    if (gomp_parallel == nullptr || !dladdr(reinterpret_cast<void*>(gomp_parallel), &info)) {
        return nullptr;
    }
    void* library = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    return library == nullptr ? nullptr : reinterpret_cast<Function>(dlsym(library, name));
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

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// A team whose size the runtime says once it runs.
struct TeamCall {
    void (*body)(void* data, Team& team, int32_t thread);
    void* data;
    int (*team_size)();
    int (*thread_number)();
    std::optional<Team> made{};
    std::atomic<Team*> team{nullptr};

    void run() {
        const int32_t thread = thread_number();
        if (thread == 0) {
            team.store(&made.emplace(team_size()), std::memory_order_release);
            team.notify_all();
        } else {
            team.wait(nullptr, std::memory_order_acquire);
        }
        body(data, *team.load(std::memory_order_acquire), thread);
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

void Team::release(uint32_t round) {
    next_.store(0, std::memory_order_relaxed);
    if (size_ == 1) return;
    arrived_.store(0, std::memory_order_relaxed);
    round_.store(round + 1, std::memory_order_release);
    round_.notify_all();
}

// A step has some hundred waits of microseconds: threads spin, and sleep only where another one has
// lost its core. The clock bounds it, because a pause takes 40 cycles on some processors and 140 on
// others.
void Team::await(uint32_t round) {
    constexpr std::chrono::microseconds kLongest(30);
    constexpr int kPauses = 32;  // 1 to 2 us between looks at the clock
    const auto end = std::chrono::steady_clock::now() + kLongest;
    do {
        for (int i = 0; i < kPauses; ++i) {
            if (round_.load(std::memory_order_acquire) != round) return;
            pause();
        }
    } while (std::chrono::steady_clock::now() < end);
    round_.wait(round, std::memory_order_acquire);
}

void run_team(int32_t num_threads, void (*body)(void* data, Team& team, int32_t thread),
              void* data) {
    static const GompParallel gomp_parallel = find_gomp_parallel();
    static const auto team_size = find_beside<int (*)()>(gomp_parallel, "omp_get_num_threads");
    static const auto thread_number = find_beside<int (*)()>(gomp_parallel, "omp_get_thread_num");
    const bool has_pool = gomp_parallel != nullptr;
    if (num_threads <= 1 || (has_pool && (team_size == nullptr || thread_number == nullptr))) {
        Team alone(1);
        return body(data, alone, 0);
    }
    if (has_pool) {
        TeamCall call{body, data, team_size, thread_number};
        return gomp_parallel([](void* p) { static_cast<TeamCall*>(p)->run(); }, &call,
                             static_cast<unsigned>(num_threads), 0);
    }
    Team team(num_threads);
    std::vector<std::thread> threads;
    threads.reserve(num_threads - 1);
    for (int32_t i = 1; i < num_threads; ++i) threads.emplace_back([&, i] { body(data, team, i); });
    body(data, team, 0);
    for (std::thread& thread : threads) thread.join();
}

}  // namespace bytetx::cpu
