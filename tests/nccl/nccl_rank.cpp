// One rank of two over NCCL, as a process that is started by itself, so that a tool can watch this one alone:
//   NCCL_HOSTID=a nccl_rank 0 /tmp/socket &
//   NCCL_HOSTID=b compute-sanitizer --tool memcheck nccl_rank 1 /tmp/socket
// The ranks meet at a socket of that path. Forward and backward of some schedules, whose rows are compared with those
// of one rank; exits with 1 if they differ. Started by bench/gpu.sh.
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <exception>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "comm/plain_ranks.h"
#include "comm/processes/communicator.h"
#include "ranks.h"
#include "text.h"

namespace weft::test {
namespace {

constexpr double kSeconds = 300;  // a tool may make the other rank slow

[[noreturn]] void fail(const char* call) {
  throw Error(text(call, ": ", std::strerror(errno)), "give both ranks one path that can be made");
}

// The socket to the other rank: rank 0 makes the path, rank 1 waits for it.
int meet(Index rank, const std::string& path) {
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  if (path.size() >= sizeof name.sun_path) throw Error(path + " is too long for a socket", "give a shorter path");
  path.copy(name.sun_path, path.size());
  const auto* address = reinterpret_cast<const sockaddr*>(&name);
  const int mine = ::socket(AF_UNIX, SOCK_STREAM, 0);
  if (mine < 0) fail("socket");
  if (rank == 0) {
    ::unlink(path.c_str());
    if (::bind(mine, address, sizeof name) != 0 || ::listen(mine, 1) != 0) fail("bind");
    const int other = ::accept(mine, nullptr, nullptr);
    if (other < 0) fail("accept");
    ::unlink(path.c_str());
    return other;
  }
  for (int tenths = 0; ::connect(mine, address, sizeof name) != 0; ++tenths) {
    if (tenths == 600) fail("connect");
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  return mine;
}

// The largest difference of a rank's rows, of all ranks' results from one rank's.
double worst(const Layout& layout, Index rank, const check::Tensor& got, const check::Tensor& want) {
  const std::vector<double> a = to_f64(got.view), b = to_f64(want.view);
  const std::size_t row = a.size() / at(got.view.rows);
  double largest = 0;
  for (const Index token : layout.tokens(rank))
    for (std::size_t i = 0; token != kNoToken && i < row; ++i) {
      const double off = std::abs(a[at(token) * row + i] - b[at(token) * row + i]);
      if (!(off <= largest)) largest = off;  // a NaN shows
    }
  return largest;
}

int run(Index rank, const std::string& path, const std::string& kernel) {
  const auto sockets = std::make_shared<processes::Sockets>(
      rank, rank == 0 ? std::vector<int>{-1, meet(rank, path)} : std::vector<int>{meet(rank, path), -1});
  const auto ranks = processes::make_communicator(2, sockets, std::make_shared<detail::BoardMemory>(2), kSeconds);
  PlainRanks comm(*ranks);  // without a board: the ranks share no memory

  RanksProblem p{
      .problem = Problem(Stream::from_lengths(std::vector<Index>{190, 7, 59}).padded_to(4), {.causal = true}),
      .heads_q = 4,
      .heads_k = 2,
      .dim_qk = 64,
      .dim_v = 64,
      .dtype = DType::bf16,
      .sink = true};
  RanksInput in(p);
  const RanksResult one = run_on_ranks(p, in, make_layouts(LayoutKind::zigzag, p.problem, 1), {}, {.kernel = kernel});
  const Layouts layouts = make_layouts(LayoutKind::zigzag, p.problem, 2);
  int wrong = 0;
  for (const ScheduleOptions& options :
       {ScheduleOptions{.kind = ScheduleKind::ring},
        {.kind = ScheduleKind::all_gather, .key_order = KeyOrder::rank, .head_groups = 2},
        {.kind = ScheduleKind::all_to_all, .head_groups = 2},
        {.kind = ScheduleKind::exact},
        {.kind = ScheduleKind::mesh}}) {
    for (const bool checked : {false, true}) {
      RanksResult got = empty_result(p, 2);
      std::mutex mutex;
      run_one_rank(comm, p, in, layouts, options, {.kernel = kernel, .checked = checked}, got, mutex);
      double off = 0;
      for (const auto& [layout, tensor] : {std::pair{&layouts.q, &RanksResult::out},
                                           {&layouts.q, &RanksResult::dq},
                                           {&layouts.k, &RanksResult::dk},
                                           {&layouts.k, &RanksResult::dv}})
        off = std::max(off, worst(*layout, rank, got.*tensor, one.*tensor));
      constexpr double kMost = 0.06;  // a few roundings to bf16 of numbers below 4
      const bool right = off <= kMost;
      std::printf("rank %td: %s%s: %s, largest difference %.1e\n", rank, weft::words(options).c_str(),
                  checked ? ", checked" : "", right ? "right" : "WRONG", off);
      wrong += right ? 0 : 1;
    }
  }
  comm.check();
  return wrong == 0 ? 0 : 1;
}

}  // namespace
}  // namespace weft::test

int main(int count, char** words) {
  if (count < 3 || (std::string(words[1]) != "0" && std::string(words[1]) != "1")) {
    std::fprintf(stderr, "usage: nccl_rank 0|1 PATH [KERNEL]\n");
    return 2;
  }
  try {
    return weft::test::run(words[1][0] - '0', words[2], count > 3 ? words[3] : "cuda.portable");
  } catch (const std::exception& e) {
    std::fprintf(stderr, "rank %s: %s\n", words[1], e.what());
    return 1;
  }
}
