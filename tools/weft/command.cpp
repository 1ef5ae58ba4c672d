// The weft command. Exit codes: 0 right, 1 a check failed or the command itself did, 2 bad input.
#include <algorithm>
#include <cstdio>
#include <exception>
#include <new>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include "flags/process_ranks.h"
#include "terminal/file_output.h"
#include "verbs.h"
#include "weft/error.h"
#include "weft/version.h"

namespace weft::tool {
namespace {

constexpr int kFailed = 1, kBadInput = 2;

struct Verb {
  CLI::App* app;
  int (*run)(const Flags&);
  std::vector<FlagSpec> specs;
  Flags flags = {};
};

std::vector<Verb> verbs_of(CLI::App& app) {
  return {{app.add_subcommand("explain", "draw who holds which tokens and which slices each rank gets"), explain,
           explain_flags()},
          {app.add_subcommand("verify", "check slices and attention of one problem, or of --random N"), verify,
           verify_flags()},
#ifdef WEFT_COMMAND_BENCH
          {app.add_subcommand("bench", "time the kernels, beside a peer if one is given"), bench, bench_flags()},
#endif
          {app.add_subcommand("simulate", "predict schedules and layouts on a machine, up to thousands of ranks"),
           simulate, simulate_flags()}};
}

// One line, whatever a flag's value was: it is part of the message.
void complain(std::string message) {
  std::replace_if(message.begin(), message.end(), [](char c) { return static_cast<unsigned char>(c) < ' '; }, '?');
  fmt::print(stderr, "weft: {}\n", message);
}

int refuse_parse(CLI::App& app, const CLI::ParseError& error, const std::vector<Verb>& verbs) {
  if (error.get_exit_code() == 0) return app.exit(error);  // --help, --version
  std::string verb;
  for (const Verb& v : verbs) {
    if (v.app->parsed()) verb = " " + v.app->get_name();
  }
  const std::vector<std::string> unknown = app.remaining(true);
  if (dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr && !unknown.empty())
    complain(fmt::format("'{}' is not known here; see weft{} --help", unknown.front(), verb));
  else
    complain(fmt::format("{}; see weft{} --help", error.what(), verb));
  return kBadInput;
}

// Before the parser, which would not say which word it did not know.
void check_verb(int argc, char** argv, const std::vector<Verb>& verbs) {
  if (argc < 2)
    throw Error("no verb",
                "use weft explain or weft verify, weft bench for timings, weft simulate, or see weft --help");
  const std::string_view word = argv[1];
  if (word == "audit")
    throw Error("weft audit calls functions of Python, which this program cannot",
                "it comes with the Python package (pip install weft-attention): python -m weft audit module:function");
#ifndef WEFT_COMMAND_BENCH
  if (word == "bench")
    throw Error("this weft was built without bench", "make build compiles all of it: build/release/weft bench");
#endif
  const bool is_verb =
      std::any_of(verbs.begin(), verbs.end(), [&](const Verb& v) { return v.app->get_name() == word; });
  if (!is_verb && word != "--help" && word != "-h" && word != "--version")
    throw Error(fmt::format("there is no verb '{}'", word),
                "use explain or verify, bench for timings, simulate, or see weft --help");
}

}  // namespace

int run(int argc, char** argv) {
  CLI::App app("Exact attention over packed documents spread over ranks: see it, check it, time it.", "weft");
  app.set_version_flag("--version", fmt::format("weft {}", version()));
  app.require_subcommand(1);
  app.footer("Exit: 0 right, 1 a check failed, 2 bad input.");
  std::vector<Verb> verbs = verbs_of(app);
  // The Python package has this one (weft/__main__.py); here it is for --help alone.
  app.add_subcommand("audit", "is an attention right? any function of Python; in the Python package");
  for (Verb& verb : verbs) verb.flags.add_to(*verb.app, verb.specs);  // the parser writes into them: they stay here
  check_verb(argc, argv, verbs);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return refuse_parse(app, error, verbs);
  }
  for (const Verb& verb : verbs) {
    if (!verb.app->parsed()) continue;
    check_outputs(verb.flags);
    if (verb.run == explain || verb.run == simulate) return verb.run(verb.flags);  // no ranks run
    return asks_for_processes(verb.flags) ? on_processes(verb.flags, verb.run) : in_this_process(verb.flags, verb.run);
  }
  return kBadInput;
}

int command(int argc, char** argv) {
  int code = kFailed;
  try {
    code = run(argc, argv);
  } catch (const Error& error) {
    complain(error.what());
    return kBadInput;
  } catch (const std::bad_alloc&) {
    complain("out of memory; use fewer tokens, documents, heads or ranks");
    return kFailed;
  } catch (const std::exception& error) {
    complain(fmt::format("internal error: {}", error.what()));
    return kFailed;
  }
  if (std::fflush(stdout) != 0 || std::ferror(stdout)) {
    std::perror("weft: cannot write to stdout");
    return kFailed;
  }
  return code;
}

}  // namespace weft::tool
