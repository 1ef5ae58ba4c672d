// run_processes: makes the sockets, forks the ranks, and reports the first failure.
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <string>

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "comm/board.h"
#include "comm/processes/communicator.h"
#include "index.h"
#include "text.h"
#include "weft/processes.h"

namespace weft {
namespace processes {
namespace {

using Clock = std::chrono::steady_clock;

[[noreturn]] void fail(const char* call) {
  throw Error(text("cannot start processes: ", call, ": ", std::strerror(errno)),
              "ask for fewer ranks, or raise the limits of this process (ulimit -n, -u)");
}

// File descriptors that are closed at the end, unless somebody took them.
class Descriptors {
 public:
  explicit Descriptors(std::size_t count) : all_(count, -1) {}
  ~Descriptors() {
    for (const int d : all_)
      if (d >= 0) ::close(d);
  }
  Descriptors(const Descriptors&) = delete;
  Descriptors& operator=(const Descriptors&) = delete;

  int& operator[](std::size_t i) { return all_[i]; }
  int take(std::size_t i) { return std::exchange(all_[i], -1); }

 private:
  std::vector<int> all_;
};

// How a rank ended. A failure that follows from another rank's is told only if there is no other.
enum class End : char { well, consequence, failure };

void report(int pipe, End end, const std::string& what) {
  const std::string line = static_cast<char>(end) + what;
  for (std::size_t done = 0; done < line.size();) {
    const ssize_t n = ::write(pipe, line.data() + done, line.size() - done);
    if (n <= 0) return;
    done += static_cast<std::size_t>(n);
  }
}

End run_rank(Index ranks, const std::shared_ptr<Sockets>& sockets, const std::shared_ptr<detail::BoardMemory>& board,
             const std::function<void(Communicator&)>& body, double time_limit, std::string& what) {
  try {
    const std::unique_ptr<Communicator> communicator = make_communicator(ranks, sockets, board, time_limit);
    body(*communicator);
    return End::well;
  } catch (const PeerError& e) {
    what = e.what();
    return e.consequence() ? End::consequence : End::failure;
  } catch (const std::exception& e) {
    what = e.what();
  } catch (...) {
    what = "an exception without a text";
  }
  return End::failure;
}

struct Child {
  pid_t process = 0;
  bool running = true, stopped = false;  // stopped: by a signal, and killed for it
  End end = End::failure;
  std::string what = {};
};

std::string death(int status, bool stopped) {
  if (stopped) return "was stopped by a signal and could not end, so it was killed";
  if (WIFSIGNALED(status))
    return text("was ended by signal ", WTERMSIG(status), " (", strsignal(WTERMSIG(status)), ")");
  return text("ended with status ", WEXITSTATUS(status), " without a word");
}

// Some have ended, and the others cannot: a signal has stopped them.
bool only_stopped_are_left(const std::vector<Child>& children) {
  bool some_ended = false;
  for (const Child& child : children) {
    some_ended = some_ended || !child.running;
    siginfo_t info{};
    if (child.running && (::waitid(P_PID, static_cast<id_t>(child.process), &info, WSTOPPED | WNOHANG | WNOWAIT) != 0 ||
                          info.si_pid == 0))
      return false;
  }
  return some_ended;
}

// Reads what the ranks report until all have ended. After a failure the others have the grace to end by themselves,
// which ranks that are stopped cannot use; these have it after all others have ended well.
void wait_for(std::vector<Child>& children, Descriptors& pipes, detail::BoardMemory& board, double grace) {
  auto limit = Clock::time_point::max();
  const auto after_grace = [grace] {
    return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(grace));
  };
  bool failed = false;
  for (std::size_t left = children.size(); left > 0;) {
    std::vector<pollfd> polled;
    std::vector<std::size_t> of;
    for (std::size_t i = 0; i < children.size(); ++i) {
      if (!children[i].running) continue;
      polled.push_back({pipes[i], POLLIN, 0});
      of.push_back(i);
    }
    constexpr int kMilliseconds = 100;
    ::poll(polled.data(), polled.size(), kMilliseconds);
    for (std::size_t p = 0; p < polled.size(); ++p) {
      if (polled[p].revents == 0) continue;
      Child& child = children[of[p]];
      char buffer[4096];
      const ssize_t n = ::read(polled[p].fd, buffer, sizeof buffer);
      if (n > 0) child.what.append(buffer, static_cast<std::size_t>(n));
      if (n > 0 || (n < 0 && errno == EINTR)) continue;
      int status = 0;
      while (::waitpid(child.process, &status, 0) < 0 && errno == EINTR) {
      }
      child.running = false;
      --left;
      if (child.what.empty()) {
        child.what = death(status, child.stopped);
      } else {
        child.end = static_cast<End>(child.what.front());
        child.what.erase(0, 1);
      }
      board.end(static_cast<Index>(of[p])) = static_cast<std::uint64_t>(
          child.end == End::well ? detail::BoardMemory::End::well : detail::BoardMemory::End::failed);
      if (child.end == End::well) continue;
      failed = true;
      limit = std::min(limit, after_grace());
    }
    const bool stopped = left > 0 && only_stopped_are_left(children);
    if (stopped)
      limit = failed ? Clock::now() : std::min(limit, after_grace());
    else if (!failed)
      limit = Clock::time_point::max();  // one that was stopped goes on
    if (Clock::now() < limit) continue;
    limit = Clock::time_point::max();
    for (Child& child : children) {
      if (!child.running) continue;
      child.end = End::consequence;
      child.stopped = stopped;
      ::kill(child.process, SIGKILL);
    }
  }
}

// In the forked process: runs the rank and ends.
[[noreturn]] void be_rank(Index rank, Index ranks, Descriptors& links, int pipe,
                          const std::shared_ptr<detail::BoardMemory>& board,
                          const std::function<void(Communicator&)>& body, const ProcessRanks& how) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);  // no rank outlives the process that started it
  std::vector<int> mine;
  for (Index peer = 0; peer < ranks; ++peer) mine.push_back(links.take(at(rank * ranks + peer)));
  for (Index i = 0; i < ranks * ranks; ++i)
    if (const int other = links.take(at(i)); other >= 0) ::close(other);
  std::string what;
  End end = End::failure;
  {
    const auto sockets = std::make_shared<Sockets>(rank, std::move(mine));
    end = run_rank(ranks, sockets, board, body, how.time_limit, what);
  }
  std::fflush(nullptr);
  report(pipe, end, what);
  std::_Exit(end == End::well ? 0 : 1);
}

}  // namespace
}  // namespace processes

void run_processes(Index ranks, const std::function<void(Communicator&)>& body, const ProcessRanks& how) {
  using namespace processes;
  constexpr Index kMost = 256;  // each has a socket to every other
  if (ranks < 1 || ranks > kMost) throw Error(text(ranks, " ranks that are processes"), text("ask for 1 to ", kMost));
  if (!(how.time_limit > 0) || !(how.grace >= 0))
    throw Error(text("a time limit of ", how.time_limit, " and a grace of ", how.grace, " seconds"),
                "give a limit of more than 0 and a grace of at least 0");
  Descriptors links(at(ranks * ranks)), pipes(at(ranks)), ends(at(ranks));
  for (Index a = 0; a < ranks; ++a) {
    for (Index b = a + 1; b < ranks; ++b) {
      int pair[2];
      if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) != 0) fail("socketpair");
      links[at(a * ranks + b)] = pair[0];
      links[at(b * ranks + a)] = pair[1];
    }
    int pipe[2];
    if (::pipe2(pipe, O_CLOEXEC) != 0) fail("pipe2");  // a program that a rank starts does not keep it open
    pipes[at(a)] = pipe[0];
    ends[at(a)] = pipe[1];
  }
  const auto board = std::make_shared<detail::BoardMemory>(ranks);
  std::fflush(nullptr);  // or every rank would write what is buffered here
  std::vector<Child> children;
  for (Index rank = 0; rank < ranks; ++rank) {
    const pid_t process = ::fork();
    if (process == 0) {
      const int own = ends.take(at(rank));
      for (Index i = 0; i < ranks; ++i) {
        ::close(pipes.take(at(i)));
        if (i != rank) ::close(ends.take(at(i)));
      }
      be_rank(rank, ranks, links, own, board, body, how);
    }
    if (process < 0) {
      const int error = errno;
      for (const Child& child : children) {
        ::kill(child.process, SIGKILL);
        ::waitpid(child.process, nullptr, 0);
      }
      errno = error;
      fail("fork");
    }
    children.push_back({.process = process});
  }
  // Ranks see that a peer has ended only if nobody else holds its end of a socket.
  for (Index i = 0; i < ranks * ranks; ++i)
    if (const int d = links.take(at(i)); d >= 0) ::close(d);
  for (Index i = 0; i < ranks; ++i) ::close(ends.take(at(i)));
  wait_for(children, pipes, *board, how.grace);
  for (const End wanted : {End::failure, End::consequence}) {
    for (std::size_t rank = 0; rank < children.size(); ++rank) {
      if (children[rank].end != wanted) continue;
      throw Error(text("rank ", rank, ": ", children[rank].what), "see to that rank first; others fail because of it");
    }
  }
}

}  // namespace weft
