// The first call of a process makes what later ones find: the pool of memory, streams, events, lists, the driver's
// functions. So this program starts itself, once for each call of CUDA, and says in a line how that went.
#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <iostream>

#include <unistd.h>

#include "check/device_mirror.h"
#include "cuda/handle_pool.h"
#include "cuda_faults/each_in_turn.h"
#include "cuda_faults/gpu_tensors.h"
#include "kernel/kernel_problem.h"

namespace weft::test {
namespace {

constexpr const char *kCall = "WEFT_COLD_CALL", *kKernel = "WEFT_COLD_KERNEL";

// Tensors to the GPU, a stream that waits for another, both passes, and back.
struct Cold {
  explicit Cold(std::string with)
      : kernel(std::move(with)),
        problem(make_problem({.tq = 40, .tk = 70, .hq = 2, .hk = 1, .dqk = 64, .dv = 64, .dtype = DType::bf16},
                             {{0, 40, 0, 70}}, 9)),
        want(problem.p),
        got(problem.p) {
    want.run(problem, "cpu", Pass::backward);
  }
  void run() const {
    check::DeviceMirror mirror(check::place_of(kernel));
    KernelForwardArgs f = got.forward_args(problem);
    KernelBackwardArgs b = got.backward_args(problem);
    f.q = b.q = mirror.in(f.q);
    f.k = b.k = mirror.in(f.k);
    f.v = b.v = mirror.in(f.v);
    b.dout = mirror.in(b.dout);
    f.out = mirror.out(f.out);
    f.lse = mirror.out(f.lse);
    f.max_logit = mirror.out(f.max_logit);
    b.out = f.out;
    b.lse = f.lse;
    b.dq = mirror.out(b.dq);
    b.dk = mirror.out(b.dk);
    b.dv = mirror.out(b.dv);
    f.place = b.place = mirror.place();
    mirror.send();
    const cuda::PooledStream another(true);
    device::follow(mirror.place(), another.get());
    attend(f, kernel);
    attend_backward(b, kernel);
    mirror.fetch();
  }
  bool is_right() const {
    const auto close = [](const Buffer& a, const Buffer& b) { return is_close(a.values(), b.values()); };
    return close(got.forward.out, want.forward.out) && close(got.forward.lse, want.forward.lse) &&
           close(got.backward.dq, want.backward.dq) && close(got.backward.dk, want.backward.dk) &&
           close(got.backward.dv, want.backward.dv);
  }

  std::string kernel;
  KernelProblem problem;
  Outputs want, got;
};

std::string cold(long n, const char* kernel) {
  alarm(60);  // ends the process
  Cold c(kernel);
  std::string said;
  faults::arm(n, false);
  try {
    c.run();
  } catch (const Error& e) {
    said = e.what();
  }
  const faults::Failed failed = faults::disarm();
  if (n >= 0 && failed.call.empty()) return "none";
  const std::string what = failed.call + ": ";
  if (said.empty() && (failed.told || !c.is_right())) return what + "nobody said so";
  if (!said.empty() && !names(said, failed.call)) return what + said;
  if (faults::left_behind() != 0) return what + "CUDA's last error is still set";
  c.run();
  if (!c.is_right()) return what + "wrong afterwards";
  return faults::words(faults::ledger());
}

std::FILE* start(long n, const char* kernel) {
  const std::string self = std::filesystem::read_symlink("/proc/self/exe");
  const std::string command =
      std::string(kCall) + "=" + std::to_string(n) + " " + kKernel + "=" + kernel + " '" + self + "'";
  return popen(command.c_str(), "r");
}
std::string end(std::FILE* process) {
  std::string line;
  std::array<char, 512> some;
  while (std::fgets(some.data(), static_cast<int>(some.size()), process) != nullptr) line += some.data();
  const int result = pclose(process);
  return result == 0 ? line : line + "ended with " + std::to_string(result);
}

TEST(ColdFaults, FirstCallOfAProcess) {
  if (device::count() == 0) GTEST_SKIP() << "no GPU";
  const char* kernel = absence("cuda.sm90", DType::bf16) ? "cuda.portable" : "cuda.sm90";
  const std::string want = end(start(-1, kernel));
  ASSERT_NE(want.find("1 pools"), std::string::npos) << want;
  constexpr long kAtOnce = 12;
  long failed = 0;
  for (bool done = false; !done && !HasFailure();) {
    std::vector<std::FILE*> some;
    for (long i = 0; i < kAtOnce; ++i) some.push_back(start(failed + i, kernel));
    for (std::FILE* process : some) {
      const std::string said = end(process);
      if (said.starts_with("none")) {
        done = true;
        continue;
      }
      EXPECT_EQ(said, want) << "call " << failed;
      ++failed;
    }
  }
  std::printf("%s, first call of a process: %ld calls\n", kernel, failed);
  EXPECT_GT(failed, 40);
}

}  // namespace
}  // namespace weft::test

int main(int argc, char** argv) {
  if (const char* n = std::getenv(weft::test::kCall)) {
    std::cout << weft::test::cold(std::strtol(n, nullptr, 10), std::getenv(weft::test::kKernel)) << "\n";
    return 0;
  }
  testing::InitGoogleTest(&argc, argv);
  const int result = RUN_ALL_TESTS();
  std::cout << "times that each call failed in this process:\n" << weft::faults::table();
  return result;
}
