#include "program.hpp"

#include <map>
#include <set>
#include <sstream>
#include <stdexcept>
#include <unordered_map>

namespace ptx {

namespace {

[[noreturn]] void unknown(const std::string& what) { throw std::runtime_error("not known here: " + what); }

// clang-format off
const std::map<std::string, Type> kTypes = {
    {"s8", Type::S8}, {"s16", Type::S16}, {"s32", Type::S32}, {"s64", Type::S64}, {"u8", Type::U8},
    {"u16", Type::U16}, {"u32", Type::U32}, {"u64", Type::U64}, {"b8", Type::B8}, {"b16", Type::B16},
    {"b32", Type::B32}, {"b64", Type::B64}, {"f16", Type::F16}, {"bf16", Type::BF16}, {"f32", Type::F32},
    {"pred", Type::Pred}, {"f16x2", Type::F16x2}, {"bf16x2", Type::BF16x2}, {"e4m3", Type::E4M3},
    {"e4m3x2", Type::E4M3x2}, {"s16x2", Type::S16x2},
};
// clang-format on

// clang-format off
const std::map<std::string, Op> kOps = {
    {"add", Op::Add}, {"sub", Op::Sub}, {"mul", Op::Mul}, {"mad", Op::Mad}, {"fma", Op::Fma}, {"min", Op::Min},
    {"max", Op::Max}, {"neg", Op::Neg}, {"abs", Op::Abs}, {"div", Op::Div}, {"rem", Op::Rem}, {"and", Op::And},
    {"or", Op::Or}, {"xor", Op::Xor}, {"not", Op::Not}, {"shl", Op::Shl}, {"shr", Op::Shr}, {"bfe", Op::Bfe},
    {"popc", Op::Popc}, {"ex2", Op::Ex2}, {"rsqrt", Op::Rsqrt}, {"selp", Op::Select}, {"setp", Op::Compare},
    {"mov", Op::Move}, {"cvt", Op::Convert}, {"prmt", Op::Permute}, {"ld", Op::Load}, {"st", Op::Store},
    {"atom", Op::Atomic}, {"red", Op::Reduction}, {"bar", Op::Barrier}, {"bra", Op::Branch}, {"ret", Op::Return},
    {"shfl", Op::Shuffle}, {"redux", Op::WarpReduction}, {"cp", Op::CopyAsync}, {"ldmatrix", Op::LoadMatrix},
    {"stmatrix", Op::StoreMatrix}, {"mma", Op::Product}, {"wgmma", Op::AsyncProduct},
    {"fence", Op::Nothing},
};
// clang-format on

// Words that choose nothing here: spaces and scopes that are told apart by name, roundings that are the only ones
// known, and what goes with one instruction alone.
const std::set<std::string> kWords = {
    "global", "shared", "param",        "gpu",        "sync",  "aligned", "approx",    "full",    "ftz",     "rn",
    "lo",     "hi",     "wide",         "satfinite",  "uni",   "acquire", "release",   "relaxed", "acq_rel", "async",
    "ca",     "cg",     "commit_group", "wait_group", "proxy", "fence",   "mma_async", "warp",    "m8n8",    "x1",
    "x2",     "x4",     "v2",           "v4",         "trans", "row",     "col",
};

// clang-format off
const std::map<std::string, Variant> kVariants = {
    {"eq", Variant::Eq}, {"ne", Variant::Ne}, {"lt", Variant::Lt}, {"le", Variant::Le}, {"gt", Variant::Gt},
    {"ge", Variant::Ge}, {"equ", Variant::Equ}, {"neu", Variant::Neu}, {"ltu", Variant::Ltu}, {"leu", Variant::Leu},
    {"gtu", Variant::Gtu}, {"geu", Variant::Geu}, {"add", Variant::Add}, {"or", Variant::Or}, {"max", Variant::Max},
    {"bfly", Variant::Butterfly}, {"idx", Variant::Index}, {"up", Variant::Up},
};
// clang-format on

std::string trim(const std::string& text) {
    const size_t first = text.find_first_not_of(" \t\r"), last = text.find_last_not_of(" \t\r");
    return first == std::string::npos ? "" : text.substr(first, last - first + 1);
}

bool starts(const std::string& text, const char* with) { return text.rfind(with, 0) == 0; }

// Split at `separator` outside braces and brackets.
std::vector<std::string> split(const std::string& text, char separator) {
    std::vector<std::string> parts(1);
    int depth = 0;
    for (char c : text) {
        depth += (c == '{' || c == '[') - (c == '}' || c == ']');
        if (c == separator && depth == 0)
            parts.emplace_back();
        else
            parts.back() += c;
    }
    if (trim(parts.back()).empty()) parts.pop_back();
    return parts;
}

u64 parse_number(std::string text) {
    if (starts(text, "0f")) return std::stoull(text.substr(2), nullptr, 16);
    if (text.back() == 'U') text.pop_back();
    const bool negative = text[0] == '-';
    const u64 value = std::stoull(text.substr(negative), nullptr, 0);
    return negative ? u64(0) - value : value;
}

// A statement's words: "ld.shared::cta.b32" to ld, shared, b32.
std::vector<std::string> words_of(const std::string& name) {
    std::vector<std::string> words;
    std::stringstream stream(name);
    for (std::string word; std::getline(stream, word, '.');) words.push_back(word.substr(0, word.find("::")));
    return words;
}

class Parser {
public:
    Program parse(const std::string& text);

private:
    using Label = std::pair<int, std::string>;
    struct Jump {
        size_t at;
        std::vector<int> scopes;
        std::string label;
    };

    int register_of(const std::string& name) {
        return registers_.try_emplace(name, int(registers_.size())).first->second;
    }
    Operand operand(const std::string& text);
    void header_line(const std::string& line);
    void body_text(const std::string& text);
    void statement(std::string text);
    void decode(Instruction& instruction);
    void resolve_jumps();

    Program program_;
    std::unordered_map<std::string, int> registers_;
    std::map<Label, int> labels_;
    std::vector<Jump> jumps_;
    std::vector<int> scopes_;
    int num_scopes_ = 0;
    std::string pending_, place_;
    bool in_entry_ = false, finished_ = false;
};

Operand Parser::operand(const std::string& untrimmed) {
    const std::string text = trim(untrimmed);
    Operand result;
    if (text == "_") {
        result.kind = Operand::Kind::Sink;
    } else if (text[0] == '[') {
        result.kind = Operand::Kind::Address;
        const std::string inside = trim(text.substr(1, text.size() - 2));
        const size_t plus = inside.find('+');
        const std::string base = trim(inside.substr(0, plus));
        if (plus != std::string::npos) result.value = parse_number(trim(inside.substr(plus + 1)));
        if (base[0] == '%')
            result.reg = register_of(base);
        else if (base == "global_smem")
            result.value += kSharedBase;
        else if (size_t at = base.find("_param_"); at != std::string::npos && plus == std::string::npos)
            result.value = std::stoull(base.substr(at + 7));
        else
            unknown(text);
    } else if (text[0] == '{') {
        result.kind = Operand::Kind::Vector;
        for (const auto& part : split(text.substr(1, text.size() - 2), ',')) result.parts.push_back(operand(part));
    } else if (text == "%tid.x" || text == "%ctaid.x") {
        result.kind = Operand::Kind::Special;
        result.special = text == "%tid.x" ? Special::ThreadX : Special::BlockX;
    } else if (text != "global_smem" && (text[0] == '%' || std::isalpha(text[0]))) {
        // Special registers, and two results in one operand.
        if (text.find_first_of(".|") != std::string::npos) unknown(text);
        result.kind = Operand::Kind::Register;
        result.reg = register_of(text);
    } else {
        result.value = text == "global_smem" ? kSharedBase : parse_number(text);
    }
    return result;
}

void Parser::decode(Instruction& in) {
    const auto words = words_of(in.text);
    const auto has = [&](const char* word) { return std::find(words.begin(), words.end(), word) != words.end(); };
    const auto found = kOps.find(words[0]);
    if (found == kOps.end()) unknown(in.text);
    in.op = found->second;
    std::vector<Type> types;
    for (size_t i = 1; i < words.size(); i++) {
        int m, n, k;
        if (auto type = kTypes.find(words[i]); type != kTypes.end())
            types.push_back(type->second);
        else if (auto variant = kVariants.find(words[i]); variant != kVariants.end())
            in.variant = variant->second;
        else if (std::sscanf(words[i].c_str(), "m%dn%dk%d", &m, &n, &k) == 3)
            in.m = m, in.n = n, in.k = k;
        else if (!kWords.contains(words[i]))
            unknown(in.text);
    }
    if (!types.empty()) in.type = types.back(), in.result = types.front();
    in.width = has("v4") || has("x4") ? 4 : has("v2") || has("x2") ? 2 : 1;
    in.shared = has("shared");
    in.acquire = has("acquire") || has("acq_rel");
    in.release = has("release") || has("acq_rel");
    in.atomic = in.acquire || in.release || has("relaxed");
    in.transposed = has("trans");
    switch (in.op) {
        case Op::Mul:
            if (has("hi")) in.op = Op::MulHi;
            if (has("wide")) in.op = Op::MulWide;
            break;
        case Op::Mad:
            if (has("hi")) unknown(in.text);
            if (has("wide")) in.op = Op::MadWide;
            break;
        case Op::Compare:
            if (in.args.size() != 3) unknown(in.text);
            break;
        case Op::Load:
            if (has("param")) in.op = Op::LoadParameter;
            [[fallthrough]];
        case Op::Store:
        case Op::Atomic:
        case Op::Reduction:
            if (!in.shared && !has("global") && !has("param")) unknown(in.text);
            if (bytes_of(in.type) * in.width > 16) unknown(in.text);
            in.atomic |= in.op == Op::Atomic || in.op == Op::Reduction;
            if (in.atomic && (in.shared || in.op == Op::Store)) unknown(in.text);
            if (in.op == Op::LoadParameter && in.width > 1) unknown(in.text);
            break;
        case Op::Barrier:
            if (has("warp"))
                in.op = Op::Nothing;
            else if (in.args.size() != 1 || in.args[0].kind != Operand::Kind::Immediate || in.args[0].value)
                unknown(in.text);
            break;
        case Op::CopyAsync:
            if (has("commit_group"))
                in.op = Op::CopyCommit;
            else if (has("wait_group"))
                in.op = Op::CopyWait;
            else if (in.args.size() < 3)
                unknown(in.text);
            break;
        case Op::Product:
            in.type = types[1];
            if (in.m != 16 || in.n != 8 || in.k * bytes_of(in.type) != 32 || types[0] != Type::F32) unknown(in.text);
            break;
        case Op::AsyncProduct:
            if (has("fence"))
                in.op = Op::Nothing;
            else if (has("commit_group"))
                in.op = Op::ProductCommit;
            else if (has("wait_group"))
                in.op = Op::ProductWait;
            else if (in.m != 64 || in.k * bytes_of(in.type) != 32 || types[0] != Type::F32)
                unknown(in.text);
            break;
        case Op::Shuffle:
            if (in.variant == Variant::None) unknown(in.text);
            break;
        case Op::WarpReduction:
            if (in.variant != Variant::Add && in.variant != Variant::Max) unknown(in.text);
            break;
        case Op::Convert: break;
        default:
            if (in.type == Type::F16x2 || in.type == Type::BF16x2 || in.type == Type::E4M3x2) unknown(in.text);
    }
    if (has("satfinite") && in.result != Type::E4M3x2) unknown(in.text);
    if ((is_collective(in.op) || in.op == Op::Barrier || in.op == Op::CopyCommit || in.op == Op::CopyWait) &&
        in.predicate >= 0)
        unknown("predicated " + in.text);
}

void Parser::statement(std::string text) {
    if (text.empty() || text[0] == '.') return;  // declarations
    Instruction instruction;
    instruction.place = place_;
    if (text[0] == '@') {
        instruction.negated = text[1] == '!';
        const size_t end = text.find_first_of(" \t"), start = instruction.negated ? 2 : 1;
        instruction.predicate = register_of(text.substr(start, end - start));
        text = trim(text.substr(end));
    }
    const size_t end = std::min(text.find_first_of(" \t{["), text.size());
    instruction.text = text.substr(0, end);
    const std::string rest = trim(text.substr(end));
    if (starts(instruction.text, "bra"))
        jumps_.push_back({program_.code.size(), scopes_, rest});
    else
        for (const auto& part : split(rest, ',')) instruction.args.push_back(operand(part));
    decode(instruction);
    program_.code.push_back(std::move(instruction));
}

// Statements, labels and scopes, which need not end with their lines.
void Parser::body_text(const std::string& text) {
    pending_ += " " + text;
    while (!finished_) {
        pending_ = trim(pending_);
        if (pending_.empty()) return;
        const size_t word = pending_.find_first_of(" \t;:{["), end = pending_.find(';');
        if (pending_[0] == '{' || pending_[0] == '}') {
            if (pending_[0] == '{')
                scopes_.push_back(num_scopes_++);
            else
                scopes_.pop_back();
            finished_ = scopes_.empty();
            pending_.erase(0, 1);
        } else if (word != std::string::npos && pending_[word] == ':' && pending_[word + 1] != ':') {
            labels_[{scopes_.back(), pending_.substr(0, word)}] = int(program_.code.size());
            pending_.erase(0, word + 1);
        } else if (end != std::string::npos) {
            statement(trim(pending_.substr(0, end)));
            pending_.erase(0, end + 1);
        } else {
            return;
        }
    }
}

void Parser::header_line(const std::string& line) {
    if (line.find(".entry") != std::string::npos) in_entry_ = true;
    if (starts(line, ".param")) program_.num_parameters++;
    if (starts(line, ".reqntid") || starts(line, ".maxntid")) program_.num_threads = std::stoi(line.substr(8));
    if (in_entry_ && starts(line, "{")) body_text(line);
}

void Parser::resolve_jumps() {
    for (const auto& jump : jumps_) {
        int& target = program_.code[jump.at].target;
        for (auto scope = jump.scopes.rbegin(); scope != jump.scopes.rend() && target < 0; ++scope)
            if (auto found = labels_.find({*scope, jump.label}); found != labels_.end()) target = found->second;
        if (target < 0) unknown("label " + jump.label);
    }
}

Program Parser::parse(const std::string& text) {
    std::stringstream stream(text);
    for (std::string line; std::getline(stream, line) && !finished_;) {
        const size_t comment = line.find("//");
        const std::string code = trim(line.substr(0, comment));
        if (starts(code, ".loc")) {
            place_ = comment == std::string::npos ? code : trim(line.substr(comment + 2));
            if (size_t at = code.find("inlined_at"); at != std::string::npos) place_ += " " + code.substr(at);
        } else if (scopes_.empty()) {
            header_line(code);
        } else if (!code.empty() && !starts(code, ".pragma")) {
            body_text(code);
        }
    }
    if (!finished_) throw std::runtime_error("no whole kernel found");
    resolve_jumps();
    program_.num_registers = int(registers_.size());
    return std::move(program_);
}

}  // namespace

int bytes_of(Type type) {
    switch (type) {
        case Type::S8:
        case Type::U8:
        case Type::B8:
        case Type::E4M3: return 1;
        case Type::S16:
        case Type::U16:
        case Type::B16:
        case Type::F16:
        case Type::BF16:
        case Type::E4M3x2: return 2;
        case Type::S64:
        case Type::U64:
        case Type::B64: return 8;
        default: return 4;
    }
}

bool is_signed(Type type) { return type == Type::S8 || type == Type::S16 || type == Type::S32 || type == Type::S64; }

bool is_collective(Op op) {
    return op == Op::Shuffle || op == Op::WarpReduction || op == Op::LoadMatrix || op == Op::StoreMatrix ||
           op == Op::Product || op == Op::AsyncProduct || op == Op::ProductCommit || op == Op::ProductWait;
}

bool is_float(Type type) { return type == Type::F16 || type == Type::BF16 || type == Type::F32; }

Program parse(const std::string& text) { return Parser().parse(text); }

}  // namespace ptx
