#include "bench/peer.h"

#include <cerrno>
#include <csignal>
#include <cstring>
#include <stdexcept>

#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include "index.h"
#include "weft/error.h"

namespace weft::tool {
namespace {

using nlohmann::json;

// Loading a large library, or one backward of the slowest peer: minutes would mean that it hangs.
constexpr int kPatienceMs = 600'000;

// A child of the shell whose stdin and stdout are ours; its stderr stays the user's.
pid_t start(const std::string& command, int& to, int& from) {
  int in[2], out[2];
  if (::pipe(in) != 0 || ::pipe(out) != 0) throw std::runtime_error(fmt::format("pipe: {}", std::strerror(errno)));
  const pid_t pid = ::fork();
  if (pid < 0) throw std::runtime_error(fmt::format("fork: {}", std::strerror(errno)));
  if (pid == 0) {
    ::dup2(in[0], STDIN_FILENO);
    ::dup2(out[1], STDOUT_FILENO);
    for (const int fd : {in[0], in[1], out[0], out[1]}) ::close(fd);
    ::execl("/bin/sh", "sh", "-c", command.c_str(), static_cast<char*>(nullptr));
    ::_exit(127);
  }
  ::close(in[0]);
  ::close(out[1]);
  to = in[1];
  from = out[0];
  return pid;
}

}  // namespace

Peer::Peer(const std::string& command) : command_(command) {
  std::signal(SIGPIPE, SIG_IGN);  // a peer that has ended is told by write() instead
  pid_ = start(command, to_, from_);
  const json hello = ask({{"do", "hello"}});
  if (!hello.contains("name") || !hello["name"].is_string()) fail("did not say its name");
  name_ = hello["name"];
  version_ = hello.value("version", "");
}

// End of input is what tells it to go.
Peer::~Peer() {
  ::close(to_);
  ::close(from_);
  int status = 0;
  while (::waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
  }
}

void Peer::fail(const std::string& what) {
  throw Error(fmt::format("--peer '{}': {}", command_, what),
              "give e.g. --peer '.venv/bin/python bench/torch_peer.py' (tools/setup.sh peer), or leave it out");
}

std::string Peer::read_line() {
  for (;;) {
    if (const std::size_t end = unread_.find('\n'); end != std::string::npos) {
      std::string line = unread_.substr(0, end);
      unread_.erase(0, end + 1);
      return line;
    }
    pollfd ready{from_, POLLIN, 0};
    const int events = ::poll(&ready, 1, kPatienceMs);
    if (events == 0) fail("no answer for ten minutes");
    char buffer[4096];
    const ssize_t n = events < 0 ? -1 : ::read(from_, buffer, sizeof buffer);
    if (n == 0) fail("ended without an answer");
    if (n > 0)
      unread_.append(buffer, at(n));
    else if (errno != EINTR)
      fail(std::strerror(errno));
  }
}

json Peer::ask(const json& question) {
  const std::string line = question.dump() + "\n";
  for (std::size_t sent = 0; sent < line.size();) {
    const ssize_t n = ::write(to_, line.data() + sent, line.size() - sent);
    if (n < 0 && errno != EINTR) break;  // it has ended; what it said before tells more
    if (n > 0) sent += at(n);
  }
  const std::string text = read_line();
  json answer = json::parse(text, nullptr, false);
  if (!answer.is_object()) fail(fmt::format("answered '{}', which is no JSON object", text.substr(0, 60)));
  if (answer.contains("error")) fail(answer["error"].dump(-1, ' ', true, json::error_handler_t::replace));
  return answer;
}

std::optional<int> Peer::prepare(const json& question) {
  const json answer = ask(question);
  if (answer.contains("refused")) {
    fmt::print(stderr, "{} refuses {}: {}\n", name_, question["what"].get<std::string>(), answer["refused"].dump());
    return {};
  }
  if (!answer.contains("id") || !answer["id"].is_number_integer()) fail("prepared nothing: the answer has no id");
  return answer["id"].get<int>();
}

std::optional<int> Peer::prepare(const BenchTask& task, const Rival& rival, int threads) {
  const check::Case& c = task.problem;
  std::vector<Index> lengths;
  for (std::size_t i = 1; i < c.q.cu_seqlens.size(); ++i) lengths.push_back(c.q.cu_seqlens[i] - c.q.cu_seqlens[i - 1]);
  return prepare({{"do", "prepare"},
                  {"what", tool::name(rival.kind)},
                  {"pass", tool::name(task.pass)},
                  {"dtype", weft::name(rival.dtype)},
                  {"threads", threads},
                  {"causal", c.mask.causal},
                  {"lengths", lengths},
                  {"heads", {c.heads_q, c.heads_k}},
                  {"dim", {c.dim_qk, c.dim_v}}});
}

std::optional<int> Peer::prepare_gpu(json question) {
  question["do"] = "prepare";
  question["device"] = "cuda";
  question["threads"] = 1;
  return prepare(question);
}
std::optional<int> Peer::prepare_gemm(DType dtype, Index size, int threads) {
  return prepare(
      {{"do", "prepare"}, {"what", "gemm"}, {"dtype", weft::name(dtype)}, {"threads", threads}, {"size", size}});
}

double Peer::time(int id, int threads) {
  const json answer = ask({{"do", "time"}, {"id", id}, {"threads", threads}});
  const bool number = answer.contains("seconds") && answer["seconds"].is_number();
  const double seconds = number ? answer["seconds"].get<double>() : 0;
  if (!(seconds > 0)) fail(fmt::format("timed nothing: {}", answer.dump()));
  return seconds;
}

void Peer::forget() { ask({{"do", "forget"}}); }

}  // namespace weft::tool
